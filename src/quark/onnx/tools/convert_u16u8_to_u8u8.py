"""`python -m quark.onnx.tools.convert_u16u8_to_u8u8`."""

from quark.onnx.converters.command_line import run_tool

if __name__ == "__main__":
    run_tool("convert_u16u8_to_u8u8")
