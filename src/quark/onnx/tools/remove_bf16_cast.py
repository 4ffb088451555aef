"""`python -m quark.onnx.tools.remove_bf16_cast`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import remove_bf16_cast

__all__ = ["remove_bf16_cast"]

if __name__ == "__main__":
    run_tool("remove_bf16_cast")
