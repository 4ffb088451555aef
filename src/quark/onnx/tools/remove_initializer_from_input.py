"""`python -m quark.onnx.tools.remove_initializer_from_input`."""

from quark.onnx.converters.command_line import run_tool

if __name__ == "__main__":
    run_tool("remove_initializer_from_input")
