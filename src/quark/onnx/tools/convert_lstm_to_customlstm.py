"""`python -m quark.onnx.tools.convert_lstm_to_customlstm`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import convert_lstm_to_customlstm

__all__ = ["convert_lstm_to_customlstm"]

if __name__ == "__main__":
    run_tool("convert_lstm_to_customlstm")
