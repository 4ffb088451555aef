"""Lowering of what says how the ranges of activations are found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.core.observers.entropy import BINS
from quark.errors import ConfigError
from quark.onnx.config.extra_options import value_of
from quark.onnx.config.settings import CalibrationSettings


def lower_calibration(options: Mapping[str, Any]) -> CalibrationSettings:
    """How the ranges of activations are found.

    Raises:
        ConfigError: An option is out of range, or of another form.
    """
    percentile = float(value_of(options, "Percentile"))
    if not 50 < percentile <= 100:
        raise ConfigError(f"Percentile={percentile}: it must be over 50 and at most 100.")
    samples: int | None = value_of(options, "CalibDataSize")
    if samples is not None and samples < 1:
        raise ConfigError(f"CalibDataSize={samples}: at least one sample is needed.")
    return CalibrationSettings(
        samples=samples,
        statistics=value_of(options, "Statistics"),
        range_file=value_of(options, "SaveAndRestore") or value_of(options, "TensorsRangeFile"),
        figures=value_of(options, "SaveTensorHistFig"),
        percentile=percentile,
        percentile_candidates=tuple(value_of(options, "PercentileCandidates")),
        percentile_metric=value_of(options, "LWPMetric"),
        symmetric_range=value_of(options, "CalibTensorRangeSymmetric"),
        entropy_levels=_levels(options),
        random_data=value_of(options, "UseRandomData"),
        random_shapes=_per_input(options, "RandomDataReaderInputShape"),
        random_ranges=_per_input(options, "RandomDataReaderInputDataRange"),
        providers=tuple(value_of(options, "ExecutionProviders")),
    )


def _levels(options: Mapping[str, Any]) -> int | None:
    """NumQuantizedBins. Raises ConfigError."""
    levels: int | None = value_of(options, "NumQuantizedBins")
    if levels is not None and not 2 <= levels <= BINS:
        raise ConfigError(f"NumQuantizedBins={levels}: it must be from 2 to {BINS}.")
    return levels


def _per_input(options: Mapping[str, Any], name: str) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """(input name, numbers) of a dict. Raises ConfigError."""
    given: Mapping[str, Any] = value_of(options, name) or {}
    for key, numbers in given.items():
        if not isinstance(numbers, (list, tuple)) or not all(isinstance(number, (int, float)) for number in numbers):
            raise ConfigError(f"{name}: {key!r} needs a list of numbers, got {numbers!r}.")
    return tuple((key, tuple(numbers)) for key, numbers in given.items())
