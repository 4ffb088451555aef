"""Which tensors have one scale, or none between two nodes, and what follows for their types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from quark.core.dtypes import DTYPES
from quark.core.spec import LayerSpec, TensorSpec
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import read_once
from quark.onnx.graph.pattern import clip_bounds
from quark.onnx.operators import ALIGN_GROUPS, SIMULATED, rule_of
from quark.onnx.placement.dual_pairs import requantized
from quark.onnx.placement.placement import FACTOR, Placement


def remove_fused(placement: Placement, settings: Settings) -> None:
    """Remove the scale between a node and the one that is fused into it: its activation, its constant factor."""
    quantized = set(placement.nodes)
    for node in placement.nodes:
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if value is None or producer is None or producer not in quantized:
                continue
            factored = not value.is_graph_output() and all(FACTOR in use.node.meta for use in value.uses())
            first = SIMULATED.get(producer.op_type, producer.op_type)
            if factored or (read_once(value) and (first, node.op_type) in settings.qdq.fused):
                spec = placement.activations.pop(value, None)
                if spec is not None and producer in placement.specific and node.outputs[0] in placement.activations:
                    placement.activations[node.outputs[0]] = spec


def share_scales(placement: Placement, settings: Settings) -> None:
    """Give one scale to what only moves data, and to the inputs and outputs of the op types that are aligned.

    An input that other nodes read, too, has a scale of its own, and is quantized once more for the aligned node.
    """
    aligned = {op_type for name in settings.qdq.align for op_type in ALIGN_GROUPS[name]}
    for node in placement.nodes:
        inputs = [value for value in node.inputs if value is not None and value in placement.activations]
        if rule_of(node.op_type).moves(node) and inputs and inputs[0] is node.inputs[0]:
            for output in [value for value in node.outputs if value in placement.activations]:
                join(placement, inputs[0], output, settings.specs.layer if settings.qdq.propagate_specs else None)
    to_align = [node for node in placement.nodes if node.op_type in aligned and not rule_of(node.op_type).moves(node)]
    readers = _readers_of_classes(placement) if to_align else {}
    for node in to_align:
        outputs = [value for value in node.outputs if value in placement.activations]
        inputs = [value for value in node.inputs if value is not None and value in placement.activations]
        if len(inputs) > 1:
            if "hard_sigmoid" in settings.npu.rules:
                inputs = _without_sigmoids(node, placement)
            inputs = _own_edges(node, placement, readers)
        members = [*inputs, *(outputs or _factored_outputs(node, placement))]
        for value in members[1:]:
            join(placement, members[0], value)


def _readers_of_classes(placement: Placement) -> dict[ir.Value, set[ir.Node | None]]:
    """What stands for a class -> the quantized nodes that read it and do more than move it; None for an output."""
    quantized, readers = set(placement.nodes), dict[ir.Value, set[ir.Node | None]]()
    for value in placement.activations:
        root = placement.root(value)
        found = readers.setdefault(root, set())
        for use in value.uses():
            moved = any(
                output in placement.activations and placement.root(output) is root for output in use.node.outputs
            )
            if use.node in quantized and not (moved and rule_of(use.node.op_type).moves(use.node)):
                found.add(use.node)
        if value.is_graph_output():
            found.add(None)
    return readers


def _own_edges(node: ir.Node, placement: Placement, readers: Mapping[ir.Value, set[ir.Node | None]]) -> list[ir.Value]:
    """The quantized inputs of a node, each of which it alone reads."""
    for index, value in enumerate(node.inputs):
        if value is not None and value in placement.activations and readers.get(placement.root(value), set()) - {node}:
            node.replace_input_with(index, requantized(value, node, placement.activations[value], placement))
    return [value for value in node.inputs if value is not None and value in placement.activations]


def _without_sigmoids(node: ir.Node, placement: Placement) -> list[ir.Value]:
    """The quantized inputs of a node, those that hold a HardSigmoid quantized once more, apart from its own scale."""
    bounded = {
        placement.root(value)
        for other in placement.nodes
        if other.op_type == "HardSigmoid"
        for value in (*other.outputs, *_factored_outputs(other, placement))
        if value in placement.activations
    }
    inputs = [value for value in node.inputs if value is not None and value in placement.activations]
    if all(placement.root(value) in bounded for value in inputs):
        return inputs
    for index, value in enumerate(node.inputs):
        if value in inputs and value is not None and placement.root(value) in bounded:
            node.replace_input_with(index, requantized(value, node, placement.activations[value], placement))
    return [value for value in node.inputs if value is not None and value in placement.activations]


def _factored_outputs(node: ir.Node, placement: Placement) -> list[ir.Value]:
    """What a node writes behind its constant factor."""
    products = [use.node for use in node.outputs[0].uses() if FACTOR in use.node.meta]
    return [value for product in products for value in product.outputs if value in placement.activations]


def join(placement: Placement, one: ir.Value, other: ir.Value, common: LayerSpec | None = None) -> None:
    """Give two tensors one scale, unless a layer of its own asks for another type on one side.

    Args:
        placement: Changed in place.
        one, other: Quantized tensors.
        common: The specs that yield: whatever shares a scale with the tensor of such a layer takes its spec.
    """
    first, second = placement.activations[one], placement.activations[other]
    if common is not None and first != second:
        first_yields, second_yields = (spec in (common.input, common.output) for spec in (first, second))
        if first_yields and not second_yields:
            _change_class(placement, one, second)
        elif second_yields and not first_yields:
            _change_class(placement, other, first)
    if placement.activations[one] == placement.activations[other]:
        placement.join(one, other)


def _change_class(placement: Placement, member: ir.Value, spec: TensorSpec) -> None:
    """Give every tensor of the class of `member` another spec."""
    root = placement.root(member)
    for value in placement.activations:
        if placement.root(value) is root:
            placement.activations[value] = spec


def free_relu_zero(placement: Placement) -> None:
    """Give the outputs of Relu and of Clip from 0 a zero point: without it, half of the codes are never used."""
    for node in placement.nodes:
        spec = placement.activations.get(node.outputs[0])
        if spec is not None and spec.has_zero_point and _starts_at_zero(node):
            free = replace(spec, dtype=DTYPES[spec.dtype.name], symmetric=False)
            placement.activations[node.outputs[0]] = free


def _starts_at_zero(node: ir.Node) -> bool:
    """Whether a node is a Relu, or a Clip whose lower bound is 0."""
    return node.op_type == "Relu" or (node.op_type == "Clip" and clip_bounds(node)[0] == 0)
