"""The presets by name: `get_default_config("A8W8")`, `A8W8_QCONFIG` and the like make new objects of the rows."""

from __future__ import annotations

from typing import Any

from quark.errors import did_you_mean
from quark.onnx.config.config import QConfig
from quark.onnx.config.legacy import QuantizationConfig
from quark.onnx.config.preset_rows import QROWS, ROWS, make_legacy

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


def __getattr__(name: str) -> Any:
    """A new object for `<NAME>_QCONFIG`, `<NAME>_CONFIG` and `DefaultConfigMapping`."""
    if name in QROWS:
        return QROWS[name].make(QConfig)
    if name.endswith("_CONFIG") and name.removesuffix("_CONFIG") in ROWS:
        return get_default_config(name)
    if name == "DefaultConfigMapping":
        return get_default_config_mapping()
    hint = "" if name.startswith("_") else " " + did_you_mean(name, [*QROWS, *(f"{row}_CONFIG" for row in ROWS)])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
