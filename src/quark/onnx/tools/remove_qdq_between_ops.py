"""`python -m quark.onnx.tools.remove_qdq_between_ops`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import remove_qdq_between_ops

__all__ = ["remove_qdq_between_ops"]

if __name__ == "__main__":
    run_tool("remove_qdq_between_ops")
