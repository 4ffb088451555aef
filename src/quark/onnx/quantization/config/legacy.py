"""Address of the older config classes."""

from quark.onnx.legacy import Config, QuantizationConfig

__all__ = ["Config", "QuantizationConfig"]
