"""Fuses GELU, as exporters spell it out, into one Gelu, which opset 20 has.

exact:  x * 1/2 * (1 + erf(x / sqrt(2)))
tanh:   x * 1/2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from quark.onnx.graph.edit import is_op, replace
from quark.onnx.graph.model_file import opset
from quark.onnx.graph.pattern import Match, either, match, op, product

_GELU_OPSET = 20
_CUBIC = 0.044715
_erf = op("Erf", either(op("Div", "x", math.sqrt(2)), op("Mul", "x", math.sqrt(0.5))))
_cube = either(op("Pow", "x", 3.0), op("Mul", op("Mul", "x", "x"), "x"))
_scaled_cube = either(op("Mul", _cube, _CUBIC), op("Mul", "x", op("Mul", "x", op("Mul", "x", _CUBIC))))
_tanh = op("Tanh", op("Mul", op("Add", "x", _scaled_cube), math.sqrt(2 / math.pi)))
PATTERNS = {"none": product("x", 0.5, op("Add", _erf, 1.0)), "tanh": product("x", 0.5, op("Add", _tanh, 1.0))}
"""Value of Gelu's attribute `approximate` -> the subgraph that it stands for."""


def gelus(graph: ir.Graph) -> Iterator[tuple[ir.Node, str, Match]]:
    """The last node of every GELU, its kind, and what it covers. The graph may be changed meanwhile."""
    for node in [node for node in graph if is_op(node, "Mul")]:
        for approximate, pattern in PATTERNS.items():
            matched = match(pattern, node)
            if matched is not None:
                yield node, approximate, matched
                break


def fuse_gelu(model: ir.Model) -> int:
    """Fuse every GELU; return how many there were."""
    if opset(model) < _GELU_OPSET:
        return 0
    count = 0
    for node, approximate, matched in gelus(model.graph):
        replace(node, "Gelu", [matched["x"]], {"approximate": approximate})
        count += 1
    return count
