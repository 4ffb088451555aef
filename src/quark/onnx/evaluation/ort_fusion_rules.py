"""Rules of ONNX Runtime's CPU provider: why it leaves a quantized node in float, the first reason that holds.

Measured on ONNX Runtime 1.31 (x86): which ops have integer kernels, and what must surround them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onnx import TensorProto

from quark.onnx.evaluation.ort_fusion_nodes import INTEGER_LAYERS, QuantizedNode
from quark.onnx.operators import CLAMPS, PRODUCTS

BYTES = frozenset({"MaxPool", "Resize"})
MOVES = BYTES | {"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Split", "Gather"}
MOVES |= {"GatherElements", "Expand", "Tile"}
FUSES = INTEGER_LAYERS | {"Add", "Mul", "Concat", "Where", "Softmax", "Sigmoid", "LeakyRelu", "ArgMax"} | MOVES
FUSES |= {"AveragePool", "GlobalAveragePool"}
_FLOAT_OUTPUT = frozenset({*PRODUCTS, "ArgMax"}) | MOVES
"""Op types by what QDQ transformers of ONNX Runtime fuse: facts of the runtime, not of the operators."""
WIDE = {TensorProto.INT16, TensorProto.UINT16}
NARROW = {TensorProto.INT4, TensorProto.UINT4}


@dataclass(frozen=True)
class _Reason:
    """One row.

    Attributes:
        holds: Whether it explains a node that was left in float.
        text: What is wrong; a format over the node.
        advice: What to do.
    """

    holds: Callable[[QuantizedNode], Any]
    text: str
    advice: str


def _narrow_weight(node: QuantizedNode) -> bool:
    return bool(node.decoders) and any(node.graph.kind(d) in NARROW for d in node.stored.values())


REASONS: dict[str, _Reason] = {
    "no_kernel": _Reason(
        lambda s: s.op not in FUSES, "There is no integer {node.op}.", "Exclude it: Q/DQ around it only costs."
    ),
    "wide": _Reason(
        lambda s: s.types & WIDE and s.op not in MOVES - BYTES,
        "There are no 16-bit integer kernels.",
        "Use 8-bit activations.",
    ),
    "narrow": _Reason(
        _narrow_weight, "4-bit weights fuse with float inputs only.", "Quantize the weight alone, or to 8 bits."
    ),
    "weight_only_conv": _Reason(
        lambda s: s.op == "Conv" and not s.decoders, "Only the weight of this Conv is quantized.", "Quantize its input."
    ),
    "weight_only_transposed": _Reason(
        lambda s: s.op in INTEGER_LAYERS and not s.decoders and s.transposed,
        "Only the weight is quantized, and it is stored transposed (transB=1).",
        "Transpose the weight, so that transB=0.",
    ),
    "weight_only_shared": _Reason(
        lambda s: s.op in INTEGER_LAYERS and not s.decoders and s.shared_weight,
        "Only the weight is quantized, and another node reads its DequantizeLinear, or a weight of the same scale.",
        "A DequantizeLinear for each node, and per-channel scales.",
    ),
    "weight_only": _Reason(
        lambda s: s.op in INTEGER_LAYERS and not s.decoders,
        "Only the weight is quantized, and MatMulNBits takes matrices only.",
        "Quantize its input too, or leave it in float.",
    ),
    "constant_data": _Reason(
        lambda s: s.op in MOVES and not s.decoders,
        "Its data are a constant, all of which is decoded in every run.",
        "Leave the constant in float, or decode it afterwards.",
    ),
    "float_input": _Reason(
        lambda s: s.float_input,
        "The input {node.float_input} is not quantized.",
        "Quantize the node that makes it, or exclude this one.",
    ),
    "float_constant": _Reason(
        lambda s: s.float_constant, "The constant {node.float_constant} is in float.", "Quantize it."
    ),
    "bias": _Reason(
        lambda s: s.bias, "The bias {node.bias}.", "Store it as int32 under input scale * weight scale (Int32Bias)."
    ),
    "mixed": _Reason(
        lambda s: s.mixed, "Its inputs have different integer types.", "Quantize constants like the activations."
    ),
    "int8_constant": _Reason(
        lambda s: s.op not in INTEGER_LAYERS and TensorProto.INT8 in s.types and s.stored,
        "It has an int8 constant; the runtime computes in uint8, and converts int8 activations only.",
        "Use uint8 activations.",
    ),
    "relu": _Reason(
        lambda s: s.activation in CLAMPS and not s.clips_by_itself,
        "A {node.activation} stands between it and a QuantizeLinear whose zero point is not the smallest code.",
        "Asymmetric activations with FoldRelu, or Q/DQ on both sides of it.",
    ),
    "clip": _Reason(
        lambda s: s.activation == "Clip",
        "A Clip follows it, with a smaller range than the QuantizeLinear after that.",
        "Limit the quantized range to the bounds of the Clip.",
    ),
    "activation": _Reason(
        lambda s: s.activation and s.op not in _FLOAT_OUTPUT,
        "A {node.activation} stands between it and the QuantizeLinear.",
        "Quantize its output directly.",
    ),
    "float_reader": _Reason(
        lambda s: s.op not in _FLOAT_OUTPUT and s.float_reader,
        "Its output is read without QuantizeLinear by {node.float_reader}.",
        "Let every reader read the DequantizeLinear.",
    ),
    "branch": _Reason(
        lambda s: s.branch,
        "More than one node reads the int8 tensor {node.branch}; the runtime computes in uint8, and converts only "
        "tensors with one reader.",
        "Use uint8 activations.",
    ),
}


def explain(node: QuantizedNode) -> tuple[str, str]:
    """The first reason that holds, and what to do about it."""
    for reason in REASONS.values():
        if reason.holds(node):
            return reason.text.format(node=node), reason.advice
    return "No known reason; the runtime's rules may have changed.", "Report the model."
