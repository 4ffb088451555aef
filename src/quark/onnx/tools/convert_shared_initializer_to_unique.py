"""`python -m quark.onnx.tools.convert_shared_initializer_to_unique`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import copy_shared_initializers as convert

__all__ = ["convert"]

if __name__ == "__main__":
    run_tool("convert_shared_initializer_to_unique")
