"""`python -m quark.onnx.tools.convert_custom_ops`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import convert_custom_ops

__all__ = ["convert_custom_ops"]

if __name__ == "__main__":
    run_tool("convert_custom_ops")
