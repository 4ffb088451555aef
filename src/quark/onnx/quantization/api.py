"""Address of the quantizer."""

from quark.onnx.quantizer import ModelQuantizer

__all__ = ["ModelQuantizer"]
