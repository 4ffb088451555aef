"""`python -m quark.onnx.tools.convert_nchw_to_nhwc`."""

from quark.onnx.converters.command_line import run_tool

if __name__ == "__main__":
    run_tool("convert_nchw_to_nhwc")
