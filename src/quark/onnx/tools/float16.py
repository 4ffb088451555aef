"""Address of the conversion from float16."""

from quark.onnx.converters.functions import convert_float16_to_float

__all__ = ["convert_float16_to_float"]
