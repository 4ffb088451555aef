"""`python -m quark.onnx.tools.convert_fp16_to_bf16`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import fp16_to_bf16_of_arguments as convert

__all__ = ["convert"]

if __name__ == "__main__":
    run_tool("convert_fp16_to_bf16")
