"""Address of the older config classes."""

from quark.onnx.config.legacy import Config, QuantizationConfig

__all__ = ["Config", "QuantizationConfig"]
