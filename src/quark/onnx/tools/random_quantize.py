"""`python -m quark.onnx.tools.random_quantize`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import random_quantize_of_arguments as main
from quark.onnx.converters.random_quantize import parse_subgraphs_list

__all__ = ["main", "parse_subgraphs_list"]

if __name__ == "__main__":
    run_tool("random_quantize")
