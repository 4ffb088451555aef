"""Which tensors have one scale, or none between two nodes, and what follows for their types."""

from __future__ import annotations

from collections.abc import Set
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
    _share_moved(placement, settings)
    to_align = [node for node in placement.nodes if node.op_type in aligned and not rule_of(node.op_type).moves(node)]
    readers = _readers_of_classes(placement) if to_align else {}
    for node in to_align:
        if len(placement.quantized(node.inputs)) > 1:
            if "hard_sigmoid" in settings.npu.rules:
                _part_from_sigmoids(node, placement)
            roots = {placement.root(value) for value in placement.quantized(node.inputs)}
            _requantize(node, placement, {root for root in roots if readers.get(root, set()) - {node}})
        written = placement.quantized(node.outputs) or _factored_outputs(node, placement)
        members = [*placement.quantized(node.inputs), *written]
        for value in members[1:]:
            join(placement, members[0], value)


def _share_moved(placement: Placement, settings: Settings) -> None:
    """Give what nodes only move, and what they give, one scale."""
    common = settings.specs.layer if settings.qdq.propagate_specs else None
    for node in placement.nodes:
        if rule_of(node.op_type).moves(node):
            for moved in placement.quantized(node.inputs[:1]):
                for output in placement.quantized(node.outputs):
                    join(placement, moved, output, common)


def _readers_of_classes(placement: Placement) -> dict[ir.Value, set[ir.Node | None]]:
    """Root of a class -> the quantized nodes that read a value of it and do more than move it; None for an output."""
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


def _part_from_sigmoids(node: ir.Node, placement: Placement) -> None:
    """Quantize once more the inputs of a node that hold a HardSigmoid, apart from its own scale, beside others."""
    sigmoids = [other for other in placement.nodes if other.op_type == "HardSigmoid"]
    bounded = {
        placement.root(value)
        for sigmoid in sigmoids
        for value in (*placement.quantized(sigmoid.outputs), *_factored_outputs(sigmoid, placement))
    }
    if {placement.root(value) for value in placement.quantized(node.inputs)} - bounded:
        _requantize(node, placement, bounded)


def _requantize(node: ir.Node, placement: Placement, roots: Set[ir.Value]) -> None:
    """Quantize the inputs of a node that are of these classes once more, for it alone."""
    for index, value in enumerate(node.inputs):
        if value is not None and value in placement.activations and placement.root(value) in roots:
            node.replace_input_with(index, requantized(value, node, placement.activations[value], placement))


def _factored_outputs(node: ir.Node, placement: Placement) -> list[ir.Value]:
    """Return the tensors that a node writes after its constant factor."""
    products = [use.node for use in node.outputs[0].uses() if FACTOR in use.node.meta]
    return placement.quantized(value for product in products for value in product.outputs)


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
        if (
            spec is not None
            and spec.has_zero_point
            and (node.op_type == "Relu" or (node.op_type == "Clip" and clip_bounds(node)[0] == 0))
        ):
            free = replace(spec, dtype=DTYPES[spec.dtype.name], symmetric=False)
            placement.activations[node.outputs[0]] = free
