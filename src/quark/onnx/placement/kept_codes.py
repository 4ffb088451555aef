"""kept_codes: what of a model is quantized already. It stays as it is, and what is float around it is quantized.

A tensor has codes where a DequantizeLinear gives it or a QuantizeLinear reads it: it gets no others. A node is kept
where it computes on such tensors: operators of codes; what turns their sums into floats; a layer whose weight is
decoded; and any other node that reads none but decoded tensors, or stands between kept nodes and the next codes.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import onnx_ir as ir

from quark.errors import ConfigError
from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import EXTENDED_OPS, is_constant, is_quantized, live_inputs
from quark.onnx.operators import ACTIVATIONS, STORES, rule_of

_SUMS = ("MatMulInteger", "ConvInteger", "DynamicQuantizeLinear")
"""Op types whose outputs are codes, sums of them, and their scales: Cast and Mul make floats of these."""


def refuse_finished(model: ir.Model) -> str | None:
    """Refuse a model that is quantized and has no layer left in float; say what is kept of one that has.

    Returns:
        A sentence for the log; None of a float model.

    Raises:
        ConfigError: It holds operators of codes, and every layer has codes; or they are the extended ones.
    """
    found = list(filter(is_quantized, model.graph.all_nodes()))
    if not found:
        return None
    extended = [node for node in found if node.op_type in EXTENDED_OPS]
    layers = sum(map(_has_float_weight, model.graph.all_nodes()))
    if extended or not layers:
        first = (extended or found)[0]
        raise ConfigError(f"The model is quantized already: it holds {first.op_type} ({first.name}).")
    kinds = ", ".join(sorted({node.op_type for node in found}))
    return (
        f"The model is quantized in part: {len(found)} nodes with codes ({kinds}) stay as they are, and the {layers} "
        "layers in float are quantized."
    )


def _is(node: ir.Node | None, op_type: str) -> bool:
    """Return True where a node is of this op type, in whatever domain: those of 16 bits are in com.microsoft."""
    return node is not None and node.op_type == op_type


def _has_float_weight(node: ir.Node) -> bool:
    """Return True where a node is a layer whose weight, or a matrix that it stores, is computed from floats alone."""
    rule = rule_of(node.op_type)
    indices = rule.stored if node.op_type in STORES else () if rule.weight is None else (rule.weight,)
    values = [node.inputs[index] for index in indices if index < len(node.inputs)]
    return any(value is not None and _is_float_constant(value) for value in values)


def _is_float_constant(value: ir.Value) -> bool:
    """Return True where a tensor is computed from constants, and by no operator of codes."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if is_constant(value):
            continue
        if node is None or is_quantized(node) or not node.inputs:
            return False
        waiting += [each for each in node.inputs if each is not None]
    return True


def has_codes(value: ir.Value | None) -> bool:
    """Return True where a tensor is decoded, or quantized where it is read."""
    return value is not None and (_is(value.producer(), "DequantizeLinear") or _quantizer(value) is not None)


def _quantizer(value: ir.Value) -> ir.Node | None:
    return next((use.node for use in value.uses() if _is(use.node, "QuantizeLinear") and use.idx == 0), None)


def decoded(value: ir.Value) -> ir.Value:
    """The tensor that stands for one in the quantized part of a graph: decoded from its codes, where it has some."""
    quantizer = _quantizer(value)
    readers = [] if quantizer is None else [use.node for use in quantizer.outputs[0].uses()]
    return next((node.outputs[0] for node in readers if _is(node, "DequantizeLinear")), value)


def kept_nodes(graph: ir.Graph) -> set[ir.Node]:
    """The nodes of a graph, in topological order, that are quantized already, or compute on codes only."""
    kept: set[ir.Node] = set()
    if any(map(is_quantized, graph)):
        for node in graph:
            if is_quantized(node) or _stays(node, kept):
                kept.add(node)
    return kept


def _stays(node: ir.Node, kept: Set[ir.Node]) -> bool:
    """Return True where a node computes on what has codes, and is no layer in float."""
    makers = [value.producer() for value in live_inputs(node)]
    if not makers or _has_float_weight(node):
        return False
    if all(_is(maker, "DequantizeLinear") for maker in makers) or _has_decoded_weight(node):
        return True
    if any(maker not in kept for maker in makers):
        return False
    if is_op(node, "Cast", "Mul"):
        return all(is_op(maker, *_SUMS, "Cast", "Mul") for maker in makers)
    coded = _are_read_by_codes(node.outputs, kept) or is_op(node, *ACTIVATIONS)
    return coded or all(_gives_codes(maker, kept) for maker in makers)


def _are_read_by_codes(values: Sequence[ir.Value], kept: Set[ir.Node]) -> bool:
    """Return True where only kept nodes, and what makes codes, read some tensors."""
    readers = [use.node for value in values for use in value.uses()]
    return all(reader in kept or _is(reader, "QuantizeLinear") for reader in readers)


def _has_decoded_weight(node: ir.Node) -> bool:
    weight = rule_of(node.op_type).weight
    return weight is not None and len(node.inputs) > weight and _is(_source(node.inputs[weight]), "DequantizeLinear")


def _gives_codes(node: ir.Node | None, kept: Set[ir.Node]) -> bool:
    """Return True where a kept node gives codes: it makes them, or only moves them."""
    while node is not None and node in kept and rule_of(node.op_type).moves(node) and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and (_is(node, "QuantizeLinear") or node.op_type.startswith("QLinear"))


def _source(value: ir.Value | None) -> ir.Node | None:
    """The node that gives a tensor, before what turns it."""
    node = None if value is None else value.producer()
    while is_op(node, "Transpose", "Reshape", "Cast") and node is not None and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node
