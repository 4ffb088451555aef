"""The presets by name: `get_default_config("A8W8")`, `A8W8_QCONFIG` and the like make new objects of the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from quark.errors import did_you_mean
from quark.onnx.config.config import QConfig
from quark.onnx.config.legacy import QuantizationConfig
from quark.onnx.config.preset_rows import ADAQUANT, ADAROUND, QROWS, ROWS, make_legacy

__all__ = ["get_default_config", "get_default_config_mapping"]


def get_default_config(config_name: str) -> QuantizationConfig:
    """A new QuantizationConfig of this name, "A8W8" or "A8W8_CONFIG".

    Raises:
        ConfigError: there is none; names the nearest.
    """
    return make_legacy(config_name, QuantizationConfig)


def get_default_config_mapping() -> dict[str, QuantizationConfig]:
    """All named configurations, new."""
    return {name: row.make(QuantizationConfig) for name, row in ROWS.items()}


def _weights_only() -> QuantizationConfig:
    """XINT8 of weights alone, with AdaRound; documented as a constant only, not by name."""
    config = get_default_config("XINT8_ADAROUND")
    config.extra_options["WeightsOnly"] = True
    return config


PARTS: Mapping[str, Callable[[], Any]] = {
    "DEFAULT_ADAROUND_PARAMS": lambda: dict(ADAROUND),
    "DEFAULT_ADAQUANT_PARAMS": lambda: dict(ADAQUANT),
    "DEFAULT_BFP_PARAMS": lambda: deepcopy(ROWS["BFP16"].options["BFPAttributes"]),
    "DEFAULT_MICROEXPONENTS_PARAMS": lambda: deepcopy(ROWS["MX6"].options["BFPAttributes"]),
    "DEFAULT_MICROSCALING_PARAMS": lambda: deepcopy(ROWS["MXINT8"].options["MXAttributes"]),
    "XINT8_WEIGHTSONLY_ADAROUND_CONFIG": _weights_only,
    "DefaultConfigMapping": get_default_config_mapping,
}
"""A documented name beside those of configurations -> what makes it."""
NAMES = [*__all__, *QROWS, *PARTS, *(f"{row}_CONFIG" for row in ROWS)]
"""All names: `from quark.onnx.quantization.config.custom_config import *` gives an object for each."""


def __getattr__(name: str) -> Any:
    """A new object for `<NAME>_QCONFIG`, `<NAME>_CONFIG`, and what `PARTS` lists."""
    if name in PARTS:
        return PARTS[name]()
    if name in QROWS:
        return QROWS[name].make(QConfig)
    if name.endswith("_CONFIG") and name.removesuffix("_CONFIG") in ROWS:
        return get_default_config(name)
    hint = (
        "" if name.startswith("_") else " " + did_you_mean(name, [*QROWS, *PARTS, *(f"{row}_CONFIG" for row in ROWS)])
    )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
