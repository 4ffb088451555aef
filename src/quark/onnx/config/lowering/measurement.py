"""Lowering of what says whether kernels are timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.errors import ConfigError
from quark.onnx.config.extra_options import value_of
from quark.onnx.config.settings import MeasurementSettings


def lower_measurement(options: Mapping[str, Any]) -> MeasurementSettings:
    """Whether kernels are timed, and where their times lie. Raises ConfigError for a path or number that is none."""
    given: bool | str = value_of(options, "MeasurePlacement")
    threads: int = value_of(options, "MeasureThreads")
    if given == "":
        raise ConfigError("MeasurePlacement='' is no path of a profile. Possible: True, for the user's cache folder.")
    if threads < 1:
        raise ConfigError(f"MeasureThreads={threads}: at least one thread is needed.")
    return MeasurementSettings(bool(given), given if isinstance(given, str) else None, threads)
