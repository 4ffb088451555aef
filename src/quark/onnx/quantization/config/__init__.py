"""Address of the configs; the named ones (`XINT8_CONFIG`, `A8W8_QCONFIG`) are made when they are asked for."""

from quark.onnx.config.config import Config, QConfig, QLayerConfig, QuantizationConfig
from quark.onnx.config.presets import __getattr__ as __getattr__
from quark.onnx.config.presets import get_default_config, get_default_config_mapping

__all__ = [
    "Config",
    "QConfig",
    "QLayerConfig",
    "QuantizationConfig",
    "get_default_config",
    "get_default_config_mapping",
]
