"""`python -m quark.onnx.tools.save_weights_hist`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import save_weights_hist_figures as main

__all__ = ["main"]

if __name__ == "__main__":
    run_tool("save_weights_hist")
