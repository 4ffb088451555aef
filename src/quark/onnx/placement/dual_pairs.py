"""Dual pairs: where two precisions meet, a tensor is quantized as it is written, then once more as it is read.

    x -> Q/DQ of the writer -> Q/DQ of the reader -> reader

So is a sigmoid that the NPU computes with at most 1/128 a step, where it meets larger values in a Concat: these would
be clipped at 1 under its scale.

A tensor that no quantized node writes has the widest type that is asked for first. Until both pairs are written an
Identity stands between them: what it gives has a spec and a scale of its own like any tensor. What only moves data
and shares the scale of its input has none before it.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from quark.core.spec import TensorSpec
from quark.onnx.graph.edit import insert
from quark.onnx.operators import rule_of
from quark.onnx.placement.placement import Placement
from quark.onnx_ops.graph_writer import producer_of

REQUANTIZED = "quark.requantized"
"""Key in `meta` of an Identity: the name of the tensor that is quantized twice."""


def widen_sources(placement: Placement) -> None:
    """Give what no quantized node writes the widest of the types that its readers ask for."""
    quantized, asked = set(placement.nodes), dict[Any, list[TensorSpec]]()
    for (node, index), spec in placement.reads.items():
        value = node.inputs[index]
        if value in placement.activations and value is not None and value.producer() not in quantized:
            asked.setdefault(value, []).append(spec)
    for value, specs in asked.items():
        placement.activations[value] = max(specs, key=lambda spec: spec.dtype.bits)


def insert_identities(placement: Placement) -> None:
    """Put an Identity before every node that reads another type than its input has."""
    made: dict[tuple[ir.Value, TensorSpec], ir.Value] = {}
    for (node, index), spec in placement.reads.items():
        value = node.inputs[index]
        actual = placement.activations.get(value) if value is not None else None
        if value is None or actual is None or actual.dtype == spec.dtype:
            continue
        root = placement.root(value)
        if rule_of(node.op_type).moves(node) and any(placement.root(output) is root for output in node.outputs):
            continue  # it gives what it reads under one scale
        if (value, spec) not in made:
            made[value, spec] = requantized(value, node, spec, placement)
        node.replace_input_with(index, made[value, spec])


def requantized(value: ir.Value, reader: ir.Node, spec: TensorSpec, placement: Placement) -> ir.Value:
    """A tensor of the values of `value` with a spec and a scale of its own, for one of its readers."""
    output = insert(reader, "Identity", [value], {}, _free_name(reader, value))
    output.type, output.shape = value.type, value.shape
    identity = producer_of(output)
    identity.meta[REQUANTIZED] = value.name
    placement.nodes.append(identity)
    placement.activations[output] = spec
    return output


def drop_identities(graph: ir.Graph) -> None:
    """Remove the Identities again."""
    for node in [node for node in graph if REQUANTIZED in node.meta]:
        source = node.inputs[0]
        assert source is not None
        node.outputs[0].replace_all_uses_with(source)
        graph.remove(node, safe=True)


def source_name(value: ir.Value) -> str:
    """The name of the tensor of the user's model that holds these values."""
    producer = value.producer()
    name = None if producer is None else producer.meta.get(REQUANTIZED)
    return str(name or value.name or "")


def _free_name(node: ir.Node, value: ir.Value) -> str:
    assert node.graph is not None
    taken = {output.name for other in node.graph for output in other.outputs} | {other.name for other in node.graph}
    name, count = f"{value.name}_dual", 1
    while name in taken:
        name, count = f"{value.name}_dual_{count}", count + 1
    return name
