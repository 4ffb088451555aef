"""`python -m quark.onnx.tools.remove_qdq_mul_add`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import remove_qdq_mul_add

__all__ = ["remove_qdq_mul_add"]

if __name__ == "__main__":
    run_tool("remove_qdq_mul_add")
