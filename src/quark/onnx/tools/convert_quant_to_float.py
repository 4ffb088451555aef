"""`python -m quark.onnx.tools.convert_quant_to_float`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import convert_quant_to_float

__all__ = ["convert_quant_to_float"]

if __name__ == "__main__":
    run_tool("convert_quant_to_float")
