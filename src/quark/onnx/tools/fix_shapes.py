"""`python -m quark.onnx.tools.fix_shapes`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import (
    find_nms,
    fix_input_and_output_shapes,
    generate_random_data,
    infer_all_tensors_shape,
    save_all_tensors_shape,
)
from quark.onnx.converters.functions import fix_shapes_of_arguments as fix_shapes
from quark.onnx.passes.fix_shapes import parse_shapes as parse_input_and_output_shapes

__all__ = [
    "find_nms",
    "fix_input_and_output_shapes",
    "fix_shapes",
    "generate_random_data",
    "infer_all_tensors_shape",
    "parse_input_and_output_shapes",
    "save_all_tensors_shape",
]

if __name__ == "__main__":
    run_tool("fix_shapes")
