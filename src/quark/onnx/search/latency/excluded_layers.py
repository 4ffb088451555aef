"""Layers that a file leaves in float, and ONNX Runtime computes in integers all the same.

Where a Conv or Gemm of float weights reads a DequantizeLinear, and a QuantizeLinear alone reads what it gives (behind a
Relu or Clip too), the runtime quantizes the weights itself as it loads the file, to int8 by their largest value, and
takes its integer kernel (its pass WeightBiasQuantization). The file says nothing of it.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.config.settings import Settings
from quark.onnx.graph.model_file import is_constant

ABSORBED = ("Conv", "Gemm")
CLIPPING = ("Relu", "Clip")
"""Dropped by the runtime before a QuantizeLinear that clips by itself."""


def in_integers_unasked(model: ir.Model, settings: Settings) -> str | None:
    """What ONNX Runtime computes in integers although it was excluded.

    Args:
        model: The quantized model.
        settings: What was asked for.

    Returns:
        A line for the log; None where nothing was excluded, all of it stays in float, or another runtime was named.
    """
    elsewhere = settings.qdq.target_given and not settings.qdq.target.startswith("ort")
    if elsewhere or not settings.specs.exclude:
        return None
    names = [node.name or "" for node in model.graph if _is_absorbed(node)]
    if not names:
        return None
    return (
        f"ONNX Runtime on a CPU computes {', '.join(names)} in integers all the same, as both neighbours are "
        "quantized: it rounds these weights to int8 when it loads the file. To keep a layer in float there, exclude "
        "the one before or behind it too."
    )


def _is_absorbed(node: ir.Node) -> bool:
    if node.op_type not in ABSORBED or node.domain or len(node.inputs) < 2:
        return False
    data, weight = node.inputs[0], node.inputs[1]
    decoded = data is not None and data.producer() is not None and _is(data.producer(), "DequantizeLinear")
    return decoded and is_constant(weight) and _only_coded(node.outputs[0])


def _only_coded(value: ir.Value) -> bool:
    """Whether one QuantizeLinear is all that reads a tensor, or what a Relu or Clip makes of it."""
    readers = [use.node for use in value.uses()]
    if len(readers) != 1 or value.is_graph_output():
        return False
    return _is(readers[0], "QuantizeLinear") or (_is(readers[0], *CLIPPING) and _only_coded(readers[0].outputs[0]))


def _is(node: ir.Node | None, *kinds: str) -> bool:
    return node is not None and node.op_type in kinds
