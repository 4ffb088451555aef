"""`python -m quark.onnx.tools.convert_a8w8_npu_to_a8w8_cpu`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import convert_a8w8_npu_to_a8w8_cpu

__all__ = ["convert_a8w8_npu_to_a8w8_cpu"]

if __name__ == "__main__":
    run_tool("convert_a8w8_npu_to_a8w8_cpu")
