"""`python -m quark.onnx.tools.convert_s8s8_to_u8s8`."""

from quark.onnx.converters.command_line import run_tool

if __name__ == "__main__":
    run_tool("convert_s8s8_to_u8s8")
