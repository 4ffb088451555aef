"""Fuses the subgraphs of GELU into one Gelu, which opset 20 has."""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.graph.edit import replace
from quark.onnx.graph.gelu import gelus
from quark.onnx.graph.model_file import opset

GELU_OPSET = 20


def fuse_gelu(model: ir.Model) -> int:
    """Fuse every GELU; return how many there were."""
    if opset(model) < GELU_OPSET:
        return 0
    count = 0
    for node, approximate, matched in gelus(model.graph):
        replace(node, "Gelu", [matched["x"]], {"approximate": approximate})
        count += 1
    return count
