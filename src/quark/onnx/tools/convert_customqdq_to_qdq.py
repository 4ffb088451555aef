"""`python -m quark.onnx.tools.convert_customqdq_to_qdq`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import convert_customqdq_to_qdq

__all__ = ["convert_customqdq_to_qdq"]

if __name__ == "__main__":
    run_tool("convert_customqdq_to_qdq")
