"""Address: the functional interface."""

from quark.onnx.quantizer import quantize_dynamic, quantize_static

__all__ = ["quantize_dynamic", "quantize_static"]
