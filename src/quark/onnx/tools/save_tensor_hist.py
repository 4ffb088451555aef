"""`python -m quark.onnx.tools.save_tensor_hist`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import save_tensor_hist_figure

__all__ = ["save_tensor_hist_figure"]

if __name__ == "__main__":
    run_tool("save_tensor_hist")
