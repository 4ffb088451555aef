"""Fuses the subgraphs of L2 normalization into one LpNormalization.

y = x / sqrt(sum(x^2))        the sum over one axis; a lower bound of the norm is dropped where it is tiny
"""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.graph.edit import axes_of, dims, is_op, replace
from quark.onnx.graph.model_file import constant
from quark.onnx.graph.pattern import Const, Match, either, match, op, scalar

_LARGEST_BOUND = 1e-5
"""Of the norm: a bound over this one is part of the function."""

_sum = op("ReduceSum", either(op("Pow", "x", 2.0), op("Mul", "x", "x")))
_bounded_sum = either(op("Max", _sum, Const("bound")), op("Clip", _sum), _sum)
_plain = either(op("ReduceL2", "x"), op("Sqrt", _bounded_sum))
_norm = either(op("Max", _plain, Const("bound")), op("Clip", _plain), _plain)
_expanded = either(op("Expand", _norm, op("Shape", "x")), op("Expand", _norm, Const("shape")), _norm)
PATTERN = either(op("Div", "x", _expanded), op("Mul", "x", op("Reciprocal", _norm)))


def fuse_l2_norm(model: ir.Model) -> int:
    """Fuse every L2 normalization over one axis; return how many there were."""
    count = 0
    for node in [node for node in model.graph if is_op(node, "Div", "Mul")]:
        matched = match(PATTERN, node)
        if matched is not None and _fuse(node, matched):
            count += 1
    return count


def _fuse(node: ir.Node, matched: Match) -> bool:
    (reduction,) = matched.of_type("ReduceSum", "ReduceL2")
    axes = axes_of(reduction)
    if axes is None or len(axes) != 1 or not reduction.attributes.get_int("keepdims", 1):
        return False
    if any(not _is_tiny(bounding) for bounding in matched.of_type("Max", "Clip")):
        return False
    if "shape" in matched.values and constant(matched["shape"]).tolist() != dims(matched["x"]):
        return False
    replace(node, "LpNormalization", [matched["x"]], {"axis": axes[0], "p": 2})
    return True


def _is_tiny(bounding: ir.Node) -> bool:
    """Return True where a Max or Clip only keeps the norm, or its square, from being zero."""
    lower = bounding.attributes.get_float("min", scalar(bounding.inputs[1]) if len(bounding.inputs) > 1 else 0.0)
    upper = bounding.attributes.get_float("max") if len(bounding.inputs) < 3 else scalar(bounding.inputs[2])
    source = bounding.inputs[0].producer() if bounding.inputs[0] is not None else None
    limit = _LARGEST_BOUND**2 if is_op(source, "ReduceSum") else _LARGEST_BOUND
    return lower <= limit and upper is None
