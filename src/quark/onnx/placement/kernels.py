"""Kernels: which nodes a runtime computes in integers, so that quantizing them gains something."""

from __future__ import annotations

import onnx_ir as ir

from quark.core.granularity import PerGroup
from quark.core.spec import TensorSpec
from quark.onnx.graph.model_file import constant, is_constant, live_inputs
from quark.onnx.operators.targets import Target
from quark.onnx.placement.placement import Placement

DYNAMIC_KERNELS = {"MatMul": "MatMulInteger", "Gemm": "MatMulInteger", "Conv": "ConvInteger"}
"""Op type -> the op that computes it in integers from an input that is quantized as it comes."""


def fits_dynamic(node: ir.Node) -> bool:
    """Whether a node has an integer kernel for its form: a constant weight that is not empty, matrices or a kernel."""
    if node.op_type not in DYNAMIC_KERNELS or is_constant(node.inputs[0]) or not is_constant(node.inputs[1]):
        return False
    weight = constant(node.inputs[1])
    return bool(weight.size) and weight.ndim >= 2


def is_depthwise(node: ir.Node) -> bool:
    """Whether each output of a convolution is a sum over one channel of several.

    Where one scale serves all channels of its input, as in what is quantized as it comes, those of small values keep
    few codes, and no sum with others hides it: the channels of a depthwise layer differ most.
    """
    return node.op_type == "Conv" and node.attributes.get_int("group", 1) > 1 and constant(node.inputs[1]).shape[1] == 1


def fits_nbits(node: ir.Node, spec: TensorSpec) -> bool:
    """Whether a node can become a MatMulNBits: blocks of 16, 32, 64 ... along the sum of a 2-D constant."""
    if node.op_type != "MatMul" or not isinstance(spec.granularity, PerGroup) or spec.dtype.bits not in (2, 4, 8):
        return False
    return constant(node.inputs[1]).ndim == 2 and fits_block_kernel(spec.granularity.size)


def fits_block_kernel(size: int) -> bool:
    """Whether the kernels of com.microsoft take blocks of this many values: 16, 32, 64 ..."""
    return size >= 16 and size & (size - 1) == 0


def gains(node: ir.Node, target: Target, placement: Placement) -> bool:
    """Whether the target's runtime gains by quantizing a node, given the nodes before it, which are placed already."""
    if target.fuses is not None and node.op_type not in target.fuses:
        return False
    if placement.half and node.op_type == "Concat":
        # Nor does it read decoded tensors then: qdq/activations.py says why.
        return False
    if node.op_type in ("Gemm", "MatMul") and target.float_output and not is_constant(node.inputs[1]):
        return False
    if node.op_type not in target.follows:
        return True
    quantized = set(placement.nodes)
    producers = [value.producer() for value in live_inputs(node)]
    return bool(producers) and all(
        producer is not None and producer in quantized and producer.op_type not in target.float_output
        for producer in producers
    )
