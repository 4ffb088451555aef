"""`python -m quark.onnx.tools.convert_fp32_to_fp16`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import fp32_to_fp16_of_arguments as convert

__all__ = ["convert"]

if __name__ == "__main__":
    run_tool("convert_fp32_to_fp16")
