"""`python -m quark.onnx.tools.convert_qdq_to_qop`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import convert_qdq_to_qop

__all__ = ["convert_qdq_to_qop"]

if __name__ == "__main__":
    run_tool("convert_qdq_to_qop")
