"""Replaces a Split by one Slice for each output."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.edit import dims, insert, is_op, is_read, prune
from quark.onnx.graph.model_file import constant, opset
from quark.onnx_ops.graph_writer import add_constant

_SLICE_INPUTS_OPSET = 10
"""Of Slice with its bounds as inputs."""


def convert_split_to_slice(model: ir.Model) -> int:
    """Replace every Split whose sizes are known; return how many there were."""
    if opset(model) < _SLICE_INPUTS_OPSET:
        return 0
    count = 0
    for node in [node for node in model.graph if is_op(node, "Split")]:
        sizes = _sizes(node)
        if sizes is not None:
            _slice(model.graph, node, sizes)
            count += 1
    return count


def _sizes(node: ir.Node) -> list[int] | None:
    """Sizes of the outputs, from the attribute, the second input, or equal shares of a known dimension."""
    if "split" in node.attributes:
        return list(node.attributes["split"].as_ints())
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        given = constant(node.inputs[1])
        return None if given is None else [int(size) for size in given]
    shape, count = dims(node.inputs[0]), len(node.outputs)
    size = None if shape is None else shape[node.attributes.get_int("axis", 0)]
    if size is None:
        return None
    share = -(-size // count)
    return [min(share, size - share * i) for i in range(count)]


def _slice(graph: ir.Graph, node: ir.Node, sizes: list[int]) -> None:
    axis = add_constant(graph, f"{node.name}_axis", np.array([node.attributes.get_int("axis", 0)], np.int64))
    ends = list(accumulate(sizes))
    for index, (size, end, output) in enumerate(zip(sizes, ends, list(node.outputs), strict=True)):
        if not is_read(output):
            continue
        name = f"{node.name}_{index}"
        bounds = [
            add_constant(graph, f"{name}_{key}", np.array([place], np.int64))
            for key, place in (("start", end - size), ("end", end))
        ]
        value = insert(node, "Slice", [node.inputs[0], *bounds, axis], {}, name)
        value.name, value.type, value.shape = output.name, output.type, output.shape
        output.replace_all_uses_with(value, replace_graph_outputs=True)
    prune(node)
