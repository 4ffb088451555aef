"""`python -m quark.onnx.tools.fix_shapes`."""

from quark.onnx.converters.command_line import run_tool

if __name__ == "__main__":
    run_tool("fix_shapes")
