"""`python -m quark.onnx.tools.convert_fp16_to_bfp16`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import convert_fp16_to_bfp16
from quark.onnx.converters.functions import fp16_to_bfp16_of_arguments as convert

__all__ = ["convert", "convert_fp16_to_bfp16"]

if __name__ == "__main__":
    run_tool("convert_fp16_to_bfp16")
