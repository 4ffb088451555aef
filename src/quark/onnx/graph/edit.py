"""Edits of a graph that keep it whole: outputs keep their names, readers inside If and Loop bodies follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from quark.core.array import NumpyArray
from quark.errors import StructureError
from quark.onnx.graph.model_file import constant

_ONNX_DOMAINS = ("", "ai.onnx")
KNOWN_DOMAINS = (*_ONNX_DOMAINS, "com.microsoft")
"""Domains whose op types the rules mean: those of ONNX, and of what ONNX Runtime's own fusions leave."""
STANDS_FOR = "stands for"
"""Key of a node's `meta`: the name of the node of the user's model that it is a part of."""

_CONTRIB_ATTRIBUTES = {
    "DynamicQuantizeLSTM": (
        *("activation_alpha", "activation_beta", "activations", "clip", "direction", "hidden_size", "input_forget"),
    ),
    "GatherBlockQuantized": ("bits", "block_size", "gather_axis", "quantize_axis"),
    "MatMulNBits": ("K", "N", "accuracy_level", "bits", "block_size"),
}
"""Attributes of the operators of com.microsoft that nodes are rewritten to."""


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Return True where a node is one of these standard operators."""
    return node is not None and node.domain in _ONNX_DOMAINS and node.op_type in op_types


def is_read(value: ir.Value) -> bool:
    """Return True where a node, of any body, reads a value, or it is an output."""
    return bool(value.uses()) or value.is_graph_output()


def read_once(value: ir.Value) -> bool:
    """Return True where exactly one node reads a value, and nothing else does."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def dims(value: ir.Value | None) -> list[int | None] | None:
    """The dimensions of a value, None where they are not fixed; None if the rank is unknown."""
    if value is None or value.shape is None:
        return None
    return [size if isinstance(size, int) else None for size in value.shape]


def axes_of(node: ir.Node) -> tuple[int, ...] | None:
    """The axes of a reduction, Squeeze or Unsqueeze, from its attribute or its constant second input."""
    if "axes" in node.attributes:
        return tuple(node.attributes["axes"].as_ints())
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if axes is None else tuple(int(axis) for axis in np.ravel(axes))


def replace(node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> ir.Node:
    """Put another op in the place of a node with one output; what only the old one read is removed."""
    old = node.outputs[0]
    new = ir.node(op_type, inputs, dict(attributes), name=node.name)
    new.meta.update(node.meta)
    new.outputs[0].name, new.outputs[0].type, new.outputs[0].shape = old.name, old.type, old.shape
    assert node.graph is not None
    node.graph.insert_before(node, [new])
    old.replace_all_uses_with(new.outputs[0], replace_graph_outputs=True)
    prune(node)
    return new


def carried_over(node: ir.Node, op_type: str, domain: str = "", **changed: Any) -> dict[str, Any]:
    """The attributes of a node for the operator that takes its place.

    Args:
        node: Which is rewritten.
        op_type, domain: Of the other operator.
        changed: Attributes that differ; None for one whose meaning the caller takes over.

    Raises:
        StructureError: The node has an attribute, not at its default, that the other operator does not know.
    """
    known = (
        _CONTRIB_ATTRIBUTES[op_type] if domain not in _ONNX_DOMAINS else onnx.defs.get_schema(op_type).attributes.keys()
    )
    kept = {}
    for name, attribute in node.attributes.items():
        if name in changed:
            continue
        if name in known:
            kept[name] = attribute.value
            continue
        default = onnx.defs.get_schema(node.op_type).attributes.get(name)
        usual = default.default_value if default and default.default_value.name else None
        if attribute.value != (None if usual is None else ir.serde.deserialize_attribute(usual).value):
            raise StructureError(
                f"{node.name} has {name}={attribute.value}, which {op_type} does not know. Possible: exclude it."
            )
    return kept | {name: value for name, value in changed.items() if value is not None}


def insert(before: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any],
           name: str) -> ir.Value:  # fmt: skip
    """A new node before another, which it is a part of; its output has its name."""
    new = ir.node(op_type, inputs, dict(attributes), name=name)
    new.outputs[0].name = name
    new.meta[STANDS_FOR] = before.meta.get(STANDS_FOR, before.name)
    assert before.graph is not None
    before.graph.insert_before(before, [new])
    return new.outputs[0]


def replace_output(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Make a value an output of a graph in the place of another; who reads that goes on reading it."""
    for position, output in enumerate(graph.outputs):
        if output is old:
            graph.outputs[position] = new


def prune(node: ir.Node) -> None:
    """Remove a node that nothing reads, and every node before it that then nothing reads."""
    stack = [node]
    while stack:
        node = stack.pop()
        if node.graph is None or any(is_read(output) for output in node.outputs):
            continue
        producers = {value.producer() for value in node.inputs if value is not None}
        graph = node.graph
        graph.remove(node, safe=True)
        stack += [producer for producer in producers if producer is not None and producer.graph is graph]


def remove_unused(model: ir.Model) -> None:
    """Drop nodes, constants, functions and imports of domains that nothing uses any more."""
    for step in (RemoveUnusedNodesPass(), RemoveUnusedFunctionsPass(), RemoveUnusedOpsetsPass()):  # type: ignore[no-untyped-call]
        step(model)


def set_initializer(value: ir.Value, array: NumpyArray) -> None:
    """Give an initializer new values under its name."""
    value.const_value = ir.Tensor(array, name=value.name)
    value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(array.shape)


def own_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """The tensors of one graph, not those of the bodies in it."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def reads_of(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the values of its graph that a node reads, by itself or in the bodies that it holds."""
    inner = (
        part
        for attribute in node.attributes.values()
        if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
        for graph in (attribute.as_graphs() if attribute.type is ir.AttributeType.GRAPHS else [attribute.as_graph()])
        for part in ir.traversal.RecursiveGraphIterator(graph)
    )
    yield from (value for value in node.inputs if value is not None)
    yield from (v for part in inner for v in part.inputs if v is not None and v.graph is node.graph)
