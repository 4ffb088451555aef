"""`python -m quark.onnx.tools.convert_opset_version`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import convert_opset_version

__all__ = ["convert_opset_version"]

if __name__ == "__main__":
    run_tool("convert_opset_version")
