"""Fuses the subgraphs of GELU into one Gelu, which opset 20 has.

exact:  x * 1/2 * (1 + erf(x / sqrt(2)))
tanh:   x * 1/2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
"""

from __future__ import annotations

import math

import onnx_ir as ir

from quark.onnx.graph.edit import is_op, replace
from quark.onnx.graph.model_file import opset
from quark.onnx.graph.pattern import either, match, op, product

GELU_OPSET = 20

_erf = op("Erf", either(op("Div", "x", math.sqrt(2)), op("Mul", "x", math.sqrt(0.5))))
_cube = either(op("Pow", "x", 3.0), op("Mul", op("Mul", "x", "x"), "x"))
_tanh = op("Tanh", op("Mul", op("Add", "x", op("Mul", _cube, 0.044715)), math.sqrt(2 / math.pi)))
PATTERNS = {
    "none": product("x", 0.5, op("Add", _erf, 1.0)),
    "tanh": product("x", 0.5, op("Add", _tanh, 1.0)),
}
"""Value of Gelu's attribute `approximate` -> the subgraph that it stands for."""


def fuse_gelu(model: ir.Model) -> int:
    """Fuse every GELU; return how many there were."""
    if opset(model) < GELU_OPSET:
        return 0
    count = 0
    for node in [node for node in model.graph if is_op(node, "Mul")]:
        for approximate, pattern in PATTERNS.items():
            matched = match(pattern, node)
            if matched is not None:
                replace(node, "Gelu", [matched["x"]], {"approximate": approximate})
                count += 1
                break
    return count
