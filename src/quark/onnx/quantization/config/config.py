"""Address of the model configs."""

from quark.onnx.config.config import Config, QConfig, QLayerConfig, QuantizationConfig

__all__ = ["Config", "QConfig", "QLayerConfig", "QuantizationConfig"]
