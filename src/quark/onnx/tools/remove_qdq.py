"""`python -m quark.onnx.tools.remove_qdq`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import remove_qdq

__all__ = ["remove_qdq"]

if __name__ == "__main__":
    run_tool("remove_qdq")
