"""`python -m quark.onnx.tools.convert_bias_int32_to_int16`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import convert_bias_int32_to_int16

__all__ = ["convert_bias_int32_to_int16"]

if __name__ == "__main__":
    run_tool("convert_bias_int32_to_int16")
