"""Which tensors have one scale, and what follows for their types."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import onnx_ir as ir

from quark.core.dtypes import DTYPES
from quark.core.spec import LayerSpec
from quark.onnx.graph.model_file import constant

if TYPE_CHECKING:
    from quark.onnx.placement.place import Placement


def join(placement: Placement, one: ir.Value, other: ir.Value, common: LayerSpec | None = None) -> None:
    """Give two tensors one scale, unless a layer of its own asks for another type on one side.

    Args:
        placement: Changed in place.
        one, other: Quantized tensors.
        common: The specs that yield: whatever shares a scale with the tensor of such a layer takes its spec.
    """
    first, second = placement.activations[one], placement.activations[other]
    yields = [common is not None and spec in (common.input, common.output) for spec in (first, second)]
    if first != second and yields[0] != yields[1]:
        spec, root = (second, placement.root(one)) if yields[0] else (first, placement.root(other))
        members = [value for value in placement.activations if placement.root(value) is root]
        placement.activations.update(dict.fromkeys(members, spec))
    if placement.activations[one] == placement.activations[other]:
        placement.join(one, other)


def free_relu_zero(placement: Placement) -> None:
    """Give the outputs of Relu and of Clip from 0 a zero point: without it, half of the codes are never used."""
    for node in placement.nodes:
        value, low = node.outputs[0], None
        if node.op_type == "Clip":
            low = node.attributes["min"].as_float() if "min" in node.attributes else None
            low = constant(node.inputs[1]) if low is None and len(node.inputs) > 1 else low
        spec = placement.activations.get(value)
        if spec is None or not spec.has_zero_point or not (node.op_type == "Relu" or (low is not None and low == 0)):
            continue
        placement.activations[value] = replace(spec, dtype=DTYPES[spec.dtype.name], symmetric=False)
