"""`python -m quark.onnx.tools.convert_shared_initializer_to_unique`."""

from quark.onnx.converters.command_line import run_tool

if __name__ == "__main__":
    run_tool("convert_shared_initializer_to_unique")
