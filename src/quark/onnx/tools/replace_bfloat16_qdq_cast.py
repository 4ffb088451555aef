"""`python -m quark.onnx.tools.replace_bfloat16_qdq_cast`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import replace_bfloat16_qdq_cast

__all__ = ["replace_bfloat16_qdq_cast"]

if __name__ == "__main__":
    run_tool("replace_bfloat16_qdq_cast")
