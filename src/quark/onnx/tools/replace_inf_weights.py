"""`python -m quark.onnx.tools.replace_inf_weights`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import replace_inf_in_onnx_weights

__all__ = ["replace_inf_in_onnx_weights"]

if __name__ == "__main__":
    run_tool("replace_inf_weights")
