"""Along which axis the blocks of a tensor lie: that which its reader multiplies and sums over.

    Conv, ConvTranspose   input 1, Conv weight 1, ConvTranspose weight 0, output 1
    MatMul                A -1, B -2, output -1
    Gemm                  A 1 and B 0, swapped by transA and transB, output -1
    Softmax, LayerNorm    their axis

What several nodes read follows the first of them; what none of these reads follows the node that writes it, then the
axis of the spec, or the last one where the tensor has fewer. A tensor without axes has no blocks: it stays in float.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from quark.core.granularity import PerGroup
from quark.core.spec import TensorSpec
from quark.onnx.placement.placement import Placement

CONVOLUTIONS = ("Conv", "ConvTranspose")


def refine_block_axes(placement: Placement, refine: bool) -> None:
    """Give every blocked tensor of a placement its axis.

    Args:
        placement: Changed in place.
        refine: Whether the ops decide; else only axes that a tensor does not have are moved to its last one.
    """
    quantized = set(placement.nodes)
    for value, spec in list(placement.activations.items()):
        if not spec.is_block:
            continue
        axes = [_input_axis(use.node, use.idx) for use in value.uses() if use.node in quantized]
        producer = value.producer()
        if producer is not None and producer in quantized:
            axes.append(_output_axis(producer))
        if _rank(value) == 0:
            del placement.activations[value]
        else:
            placement.activations[value] = _along(spec, value, axes if refine else [])
    for (node, index), spec in list(placement.weights.items()):
        weight = node.inputs[index]
        if weight is None or not spec.is_block:
            continue
        if _rank(weight) == 0:
            del placement.weights[node, index]
        else:
            placement.weights[node, index] = _along(spec, weight, [_input_axis(node, index)] if refine else [])


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _along(spec: TensorSpec, value: ir.Value, axes: list[int | None]) -> TensorSpec:
    """The spec with the first axis that is known, within those of the tensor."""
    assert isinstance(spec.granularity, PerGroup)
    axis, rank = next((axis for axis in axes if axis is not None), spec.granularity.axis), _rank(value)
    if rank is not None and not -rank <= axis < rank:
        axis = rank - 1 if axis > 0 else 0
    return replace(spec, granularity=replace(spec.granularity, axis=axis))


def _input_axis(node: ir.Node, index: int) -> int | None:
    if node.op_type in CONVOLUTIONS:
        return 0 if index == 1 and node.op_type == "ConvTranspose" else 1
    if node.op_type == "MatMul":
        return -1 if index == 0 else -2
    if node.op_type == "Gemm" and index < 2:
        transposed = node.attributes.get_int("transA" if index == 0 else "transB", 0)
        return int(bool(transposed) == bool(index))
    if node.op_type in ("Softmax", "LayerNormalization") and index == 0:
        return node.attributes.get_int("axis", -1)
    return None


def _output_axis(node: ir.Node) -> int | None:
    if node.op_type in CONVOLUTIONS:
        return 1
    return -1 if node.op_type in ("MatMul", "Gemm") else _input_axis(node, 0)
