"""`python -m quark.onnx.tools.convert_onnx_to_onnxtxt`."""

from quark.onnx.converters.command_line import run_tool

if __name__ == "__main__":
    run_tool("convert_onnx_to_onnxtxt")
