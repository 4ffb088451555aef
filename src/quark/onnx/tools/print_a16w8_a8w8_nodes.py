"""`python -m quark.onnx.tools.print_a16w8_a8w8_nodes`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import print_a16w8_a8w8_nodes
from quark.onnx.converters.node_precision import a16w8_a8w8_nodes

__all__ = ["a16w8_a8w8_nodes", "print_a16w8_a8w8_nodes"]

if __name__ == "__main__":
    run_tool("print_a16w8_a8w8_nodes")
