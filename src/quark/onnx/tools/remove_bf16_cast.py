"""`python -m quark.onnx.tools.remove_bf16_cast`."""

from quark.onnx.converters.command_line import run_tool

if __name__ == "__main__":
    run_tool("remove_bf16_cast")
