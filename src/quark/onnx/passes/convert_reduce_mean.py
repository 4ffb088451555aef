"""Replaces ReduceMean over all axes after the channels by GlobalAveragePool, followed by Flatten without keepdims."""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.graph.edit import axes_of, dims, insert, is_op, replace


def convert_reduce_mean(model: ir.Model) -> int:
    """Replace every ReduceMean over the height and width of images; return how many there were."""
    count = 0
    for node in [node for node in model.graph if is_op(node, "ReduceMean")]:
        shape, axes = dims(node.inputs[0]), axes_of(node)
        if shape is None or axes is None or len(shape) != 4 or {axis % 4 for axis in axes} != {2, 3}:
            continue
        if node.attributes.get_int("keepdims", 1):
            replace(node, "GlobalAveragePool", [node.inputs[0]], {})
        else:
            pooled = insert(node, "GlobalAveragePool", [node.inputs[0]], {}, f"{node.name}_pool")
            pooled.type = node.outputs[0].type
            replace(node, "Flatten", [pooled], {"axis": 1})
        count += 1
    return count
