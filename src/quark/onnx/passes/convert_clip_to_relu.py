"""Replaces Clip by Relu, where quantization clips at the upper bound by itself or the user accepts to lose it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.core.dtypes import DTYPES
from quark.onnx.graph.edit import is_op, read_once, replace
from quark.onnx.graph.model_file import constant
from quark.onnx.graph.pattern import clip_bounds, scalar


def convert_clip_to_relu(model: ir.Model) -> int:
    """Replace Clip(0, m) before a QuantizeLinear in which m is the largest code: outputs stay as they are."""
    count = 0
    for node in [node for node in model.graph if is_op(node, "Clip")]:
        lower, upper = clip_bounds(node)
        readers = [use.node for use in node.outputs[0].uses()]
        if lower == 0 and read_once(node.outputs[0]) and _saturates(readers[0], upper):
            replace(node, "Relu", [node.inputs[0]], {})
            count += 1
    return count


def replace_clip6_relu(model: ir.Model) -> int:
    """Replace every Clip(0, 6) by Relu, which differs where the input is over 6."""
    count = 0
    for node in [node for node in model.graph if is_op(node, "Clip") and clip_bounds(node) == (0, 6)]:
        replace(node, "Relu", [node.inputs[0]], {})
        count += 1
    return count


def _saturates(reader: ir.Node, bound: float) -> bool:
    """Return True where a QuantizeLinear of one scale gives the largest code at a bound, and so for all above it."""
    if reader.op_type != "QuantizeLinear":
        return False
    scale, zero = scalar(reader.inputs[1]), constant(reader.inputs[2]) if len(reader.inputs) > 2 else None
    if zero is None or str(zero.dtype) not in DTYPES or np.isnan(scale):
        return False
    return bool(np.rint(bound / scale) + float(zero.reshape(-1)[0]) >= DTYPES[str(zero.dtype)].max)
