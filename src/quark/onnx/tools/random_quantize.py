"""`python -m quark.onnx.tools.random_quantize`."""

from quark.onnx.converters.command_line import run_tool

if __name__ == "__main__":
    run_tool("random_quantize")
