"""Attention masks: tensors that carry the most negative float, or -inf, beside other values.

No scale serves both, and in a block format one such value takes the exponent of its block: the others become 0. Where
data is seen, calibration finds them by their range. Block formats see none; there they are found by where they come
from: a huge constant, and what it is added to, selected with, or moved.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import constant
from quark.onnx.operators import RULES

MASK = 1e30
"""Larger magnitudes are masks (the most negative float before a Softmax): they stay in float."""
HALF_MASK = 6e4

CARRIES = {"Add", "Sub", "Mul", "Where", "Min", "Max", "Cast", "ScatterND"}
CARRIES |= {name for name, rule in RULES.items() if rule.shares_scale}


def is_mask(value: ir.Value) -> bool:
    """Whether a constant, or what a ConstantOfShape fills with, is the -3e38 of an attention mask, -inf or NaN."""
    node = value.producer()
    filling = node is not None and is_op(node, "ConstantOfShape") and node.attributes.get("value")
    array = filling.as_tensor().numpy() if filling else constant(value)
    if array is None or array.dtype.kind != "f" or not array.size:
        return False
    return not bool((abs(array.astype(np.float64)) <= limit(array.dtype.name)).all())


def limit(dtype: str) -> float:
    """The magnitude over which values of a float type are a mask: float16 ends at 65504."""
    return HALF_MASK if dtype == "float16" else MASK


def masked_values(graph: ir.Graph) -> set[ir.Value]:
    """The tensors of a graph that hold values of a mask."""
    found: set[ir.Value] = set()
    for node in graph:
        if node.op_type in CARRIES and any(v is not None and (v in found or is_mask(v)) for v in node.inputs):
            found.update(node.outputs)
    return found
