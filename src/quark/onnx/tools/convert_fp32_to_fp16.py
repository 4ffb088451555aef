"""`python -m quark.onnx.tools.convert_fp32_to_fp16`."""

from quark.onnx.converters.command_line import run_tool

if __name__ == "__main__":
    run_tool("convert_fp32_to_fp16")
