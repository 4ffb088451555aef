"""`python -m quark.onnx.tools.convert_u16s8_to_s16s8`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import convert_u16s8_to_s16s8
from quark.onnx.converters.functions import u16s8_to_s16s8_of_arguments as convert

__all__ = ["convert", "convert_u16s8_to_s16s8"]

if __name__ == "__main__":
    run_tool("convert_u16s8_to_s16s8")
