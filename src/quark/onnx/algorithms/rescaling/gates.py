"""gates: a tensor that is multiplied by what is computed of it: a hard-swish, a SiLU, squeeze and excitation."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.onnx.graph.edit import STANDS_FOR, dims, is_op, read_once
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx_ops.graph_writer import add_constant

_ON_THE_WAY = ("HardSigmoid", "Sigmoid", "Add", "Clip", "Mul", "Div", "Conv", "Relu", "GlobalAveragePool", "ReduceMean")
"""Op types of the way from a tensor to its gate."""


def gate_of(value: ir.Value) -> tuple[ir.Node, int, ir.Value] | None:
    """Return the first node of the gate of a tensor, which of its inputs the tensor is, and the product of both.

    None where the tensor is not read by these two alone, or its rank is not known.
    """
    uses = [] if value.is_graph_output() or dims(value) is None else list(value.uses())
    products = [use.node for use in uses if is_op(use.node, "Mul")]
    if len(uses) != 2 or len(products) != 1:
        return None
    (product,) = products
    ((gate, index),) = [use for use in uses if use.node is not product]
    other = product.inputs[1 - list(product.inputs).index(value)]
    return None if other is None or not _leads_to(gate, other) else (gate, index, product.outputs[0])


def _leads_to(node: ir.Node, value: ir.Value) -> bool:
    """Return True where a node and those after it, each read by the next alone, give a tensor of a gate."""
    while is_op(node, *_ON_THE_WAY) and len([x for x in node.inputs if not is_constant(x)]) == 1:
        if node.outputs[0] is value:
            return read_once(value)
        if not read_once(node.outputs[0]):
            return False
        ((node, _),) = node.outputs[0].uses()
    return False


def is_pointwise(gate: ir.Node) -> bool:
    """Return True where the first node of a gate reads each value by itself: a sigmoid, or the sum of a hard-swish."""
    numbers = [value for value in gate.inputs if is_constant(value) and constant(value).size == 1]
    return is_op(gate, "HardSigmoid", "Sigmoid") or (is_op(gate, "Add") and bool(numbers))


def read_as_it_was(node: ir.Node, index: int, scale: NumpyArray) -> None:
    """Let a gate read its tensor without the scale that its channels, along the axis 1, have got.

    Args:
        node: The first node of the gate, or a HardSwish, which becomes a HardSigmoid and a product.
        index: Which of its inputs the tensor is.
        scale: Of each channel, (channels,).
    """
    value, graph = node.inputs[index], node.graph
    assert value is not None and graph is not None
    shape = [-1, *[1] * (len(dims(value) or ()) - 2)]
    factor = add_constant(graph, f"{value.name}_unscale", (1 / scale).reshape(shape).astype(np.float32))
    unscaled = _node("Mul", [value, factor], f"{value.name}_unscaled", node, value)
    graph.insert_before(node, unscaled)
    if not is_op(node, "HardSwish"):
        node.replace_input_with(index, unscaled.outputs[0])
        return
    gate = _node("HardSigmoid", [unscaled.outputs[0]], f"{node.name}_gate", node, value, alpha=1 / 6, beta=0.5)
    product = _node("Mul", [value, gate.outputs[0]], f"{node.name}_product", node, value)
    graph.insert_before(node, [gate, product])
    product.outputs[0].name, node.outputs[0].name = node.outputs[0].name, None
    node.outputs[0].replace_all_uses_with(product.outputs[0])
    graph.remove(node, safe=True)


def _node(
    op_type: str, inputs: list[ir.Value], name: str, instead: ir.Node, like: ir.Value, **attributes: float
) -> ir.Node:
    """A node that stands for another, whose output is like a tensor."""
    made = ir.node(op_type, inputs, attributes, name=name)
    made.meta[STANDS_FOR] = instead.meta.get(STANDS_FOR) or instead.name
    output = made.outputs[0]
    output.name, output.type, output.shape = name, like.type, like.shape
    return made
