"""`python -m quark.onnx.tools.convert_dynamic_to_fixed`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import fix_input_shapes as fix_shapes
from quark.onnx.converters.functions import get_input_shapes, get_output_shapes

__all__ = ["fix_shapes", "get_input_shapes", "get_output_shapes"]

if __name__ == "__main__":
    run_tool("convert_dynamic_to_fixed")
