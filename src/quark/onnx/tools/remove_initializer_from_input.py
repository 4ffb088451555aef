"""`python -m quark.onnx.tools.remove_initializer_from_input`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import remove_initializer_of_arguments as remove_initializer_from_input

__all__ = ["remove_initializer_from_input"]

if __name__ == "__main__":
    run_tool("remove_initializer_from_input")
