"""`python -m quark.onnx.tools.convert_s8s8_to_u8s8`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import convert_s8s8_to_u8s8
from quark.onnx.converters.functions import s8s8_to_u8s8_of_arguments as convert

__all__ = ["convert", "convert_s8s8_to_u8s8"]

if __name__ == "__main__":
    run_tool("convert_s8s8_to_u8s8")
