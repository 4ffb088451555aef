"""Fuses the subgraphs of layer normalization into one LayerNormalization, which opset 17 has.

y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * gamma + beta        means over the last axes
"""

from __future__ import annotations

import math

import onnx_ir as ir

from quark.onnx.graph.edit import axes_of, dims, replace
from quark.onnx.graph.model_file import constant, opset
from quark.onnx.graph.pattern import Const, Match, Pattern, either, match, op, scalar

_LAYER_NORM_OPSET = 17

_mean = op("ReduceMean", "x")
_centered = op("Sub", "x", _mean)
_variance = op("ReduceMean", either(op("Pow", _centered, 2.0), op("Mul", _centered, _centered)))
_deviation = op("Sqrt", op("Add", _variance, Const("epsilon")))
_inverse = op("Reciprocal", _deviation)
_scaled = op("Mul", either(op("Div", _centered, _deviation), op("Mul", _centered, _inverse)), Const("gamma"))
_factor = op("Mul", _inverse, Const("gamma"))
_folded = op("Add", op("Mul", "x", _factor), op("Sub", Const("beta"), op("Mul", _mean, _factor)))
NORMALIZED: tuple[Pattern, ...] = (op("Add", _scaled, Const("beta")), _folded, _scaled)
"""Subgraphs of a normalization, longest first; which axes the means run over says whether of layers or instances."""


def fuse_layer_norm(model: ir.Model) -> int:
    """Fuse every layer normalization; return how many there were."""
    if opset(model) < _LAYER_NORM_OPSET:
        return 0
    count = 0
    for pattern in NORMALIZED:
        for node in list(model.graph):
            matched = match(pattern, node) if node.op_type in ("Add", "Mul") else None
            if matched is not None and _fuse(node, matched):
                count += 1
    return count


def reduced_axes(matched: Match) -> tuple[int, ...] | None:
    """The axes, counted from the front, that both means of a match run over; None where they differ or are unknown."""
    shape = dims(matched["x"])
    axes = {axes_of(node) for node in matched.of_type("ReduceMean")}
    keeps = all(node.attributes.get_int("keepdims", 1) for node in matched.of_type("ReduceMean"))
    only = axes.pop() if len(axes) == 1 else None
    if shape is None or not only or not keeps:
        return None
    return tuple(sorted(axis % len(shape) for axis in only))


def _fuse(node: ir.Node, matched: Match) -> bool:
    axes, shape, epsilon = reduced_axes(matched), dims(matched["x"]), scalar(matched["epsilon"])
    if axes is None or shape is None or math.isnan(epsilon) or axes != tuple(range(axes[0], len(shape))):
        return False
    affine = [matched[name] for name in ("gamma", "beta") if name in matched.values]
    if any(list(constant(value).shape) != shape[axes[0] :] for value in affine):
        return False
    replace(node, "LayerNormalization", [matched["x"], *affine], {"axis": axes[0] - len(shape), "epsilon": epsilon})
    return True
