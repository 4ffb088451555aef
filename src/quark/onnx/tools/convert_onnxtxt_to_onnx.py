"""`python -m quark.onnx.tools.convert_onnxtxt_to_onnx`."""

from quark.onnx.converters.command_line import run_tool

if __name__ == "__main__":
    run_tool("convert_onnxtxt_to_onnx")
