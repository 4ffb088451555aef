"""Normalizations over the last axis, fused or in parts, and the constants that they multiply and add.

layer norm  y = (x - mean x) / sqrt(mean((x - mean x)^2) + eps) * gain + bias
RMS norm    y = x / sqrt(mean(x^2) + eps) * gain
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from quark.onnx.graph.channels import ChannelConstant
from quark.onnx.graph.edit import KNOWN_DOMAINS, axes_of, dims
from quark.onnx.graph.model_file import is_constant
from quark.onnx.graph.pattern import Const, Pattern, either, match, op


@dataclass(frozen=True)
class _Fused:
    """An op: the inputs that it adds up and normalizes, those of its constants, and the output with the sum."""

    gain: int
    bias: int | None = None
    sources: tuple[int, ...] = (0,)
    added: int | None = None
    total: int | None = None
    centred: bool = False


FUSED = {
    "LayerNormalization": _Fused(1, 2, centred=True),
    "RMSNormalization": _Fused(1),
    "SimplifiedLayerNormalization": _Fused(1),
    "SkipLayerNormalization": _Fused(2, 3, sources=(0, 1), added=4, total=3, centred=True),
    "SkipSimplifiedLayerNormalization": _Fused(2, sources=(0, 1), added=3, total=3),
}

_mean = op("ReduceMean", either(op("Pow", "x", 2.0), op("Mul", "x", "x")))
_deviation = op("Sqrt", op("Add", _mean, Const("epsilon")))
_inverse = either(op("Reciprocal", _deviation), op("Div", 1.0, _deviation),
                  op("Pow", op("Add", _mean, Const("epsilon")), -0.5))  # fmt: skip
_normalized = either(op("Mul", "x", _inverse), op("Div", "x", _deviation))
_IN_PARTS: tuple[Pattern, ...] = (op("Mul", _normalized, Const("gain")), _normalized)
"""RMS norms, with a gain first."""


@dataclass(frozen=True)
class Normalization:
    """One normalization.

    Attributes:
        sources: What is added up and normalized, mostly one tensor.
        output: What it gives.
        nodes: What it is made of, the last one first.
        gain, bias: Its constants.
        added: A constant that is added to the sources.
        total: The sum of the sources, where it gives that too.
        centred: Whether the mean is subtracted.
    """

    sources: tuple[ir.Value, ...]
    output: ir.Value
    nodes: tuple[ir.Node, ...]
    gain: ChannelConstant | None = None
    bias: ChannelConstant | None = None
    added: ChannelConstant | None = None
    total: ir.Value | None = None
    centred: bool = False


def find_norms(graph: ir.Graph) -> list[Normalization]:
    """Every normalization over the last axis with constant gain and bias."""
    found = [norm for node in graph if (norm := fused_norm(node)) is not None]
    covered: set[ir.Node] = set()
    for pattern in _IN_PARTS:
        for node in graph:
            parts = match(pattern, node) if node.op_type in ("Mul", "Div") and node not in covered else None
            if parts is None:
                continue
            (mean,), shape, first = parts.of_type("ReduceMean"), dims(parts["x"]), parts.nodes[0]
            last = {(-1,), (len(shape) - 1,)} if shape is not None else {(-1,)}
            if axes_of(mean) in last and bool(mean.attributes.get_int("keepdims", 1)):
                index = first.inputs.index(parts["gain"]) if "gain" in parts.values else None
                covered.update(parts.nodes)
                found.append(Normalization((parts["x"],), node.outputs[0], parts.nodes, _constant(first, index)))
    return found


def _is_of_last_axis(norm: ir.Node) -> bool:
    shape = dims(norm.inputs[0]) if norm.inputs else None
    axis = norm.attributes.get_int("axis", -1)
    return axis == -1 or (shape is not None and axis == len(shape) - 1)


def fused_norm(node: ir.Node) -> Normalization | None:
    """The normalization that a node is, or None."""
    row = FUSED.get(node.op_type) if node.domain in KNOWN_DOMAINS else None
    if row is None or not _is_of_last_axis(node):
        return None
    constants = {
        name: _constant(node, index) for name, index in (("gain", row.gain), ("bias", row.bias), ("added", row.added))
    }
    if any(constant is not None and not is_constant(constant.value) for constant in constants.values()):
        return None
    sources = tuple(value for index in row.sources if (value := node.inputs[index]) is not None)
    gives = row.total is not None and row.total < len(node.outputs)
    total = node.outputs[row.total] if gives and row.total is not None else None
    return Normalization(sources, node.outputs[0], (node,), **constants, total=total, centred=row.centred)


def _constant(node: ir.Node, index: int | None) -> ChannelConstant | None:
    if index is None or index >= len(node.inputs) or node.inputs[index] is None:
        return None
    return ChannelConstant(node, index)
