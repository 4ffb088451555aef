"""Kernels: which nodes a runtime computes in integers, so that quantizing them gains something.

A product that a logarithm takes, as in log-mel features, is lost by int8 activations, and not by int8 weights:

    y = W q s + e,  |e| ~ s    ->    log(y + e) = log y + log(1 + e / y)

One step `s` for a whole spectrum is a 255th of its noisiest value, while the logarithm is of values a millionth of it:
those become 0, or noise. A rounded weight is off by a share of itself, which the logarithm turns into a small constant.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.core.granularity import PerGroup
from quark.core.spec import TensorSpec
from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import constant, is_constant, live_inputs
from quark.onnx.operators import PRODUCTS, RULES
from quark.onnx.operators.targets import Target
from quark.onnx.placement.placement import Placement

DYNAMIC_KERNELS = {"MatMul": "MatMulInteger", "Gemm": "MatMulInteger", "Conv": "ConvInteger"}
"""Op type -> the op that computes it in integers from an input that is quantized as it comes."""


def fits_dynamic(node: ir.Node) -> bool:
    """Return True where a node has the form of an integer kernel: a constant weight of two axes or more, not empty."""
    if node.op_type not in DYNAMIC_KERNELS or is_constant(node.inputs[0]) or not is_constant(node.inputs[1]):
        return False
    weight = constant(node.inputs[1])
    return bool(weight.size) and weight.ndim >= 2


def is_depthwise(node: ir.Node) -> bool:
    """Return True where each output of a convolution is a sum over one channel of several.

    Where one scale serves all channels of its input, as in what is quantized as it comes, those of small values keep
    few codes, and no sum with others hides it: the channels of a depthwise layer differ most.
    """
    return node.op_type == "Conv" and node.attributes.get_int("group", 1) > 1 and constant(node.inputs[1]).shape[1] == 1


def fits_nbits(node: ir.Node, spec: TensorSpec) -> bool:
    """Return True where a node can become a MatMulNBits: blocks of 16, 32, 64 ... along the sum of a 2-D constant."""
    if node.op_type != "MatMul" or not isinstance(spec.granularity, PerGroup) or spec.dtype.bits not in (2, 4, 8):
        return False
    return constant(node.inputs[1]).ndim == 2 and fits_block_kernel(spec.granularity.size)


def fits_block_kernel(size: int) -> bool:
    """Return True where the kernels of com.microsoft take blocks of this many values: 16, 32, 64 ..."""
    return size >= 16 and size & (size - 1) == 0


def gains(node: ir.Node, target: Target, placement: Placement) -> bool:
    """Return True where the target's runtime gains by quantizing a node, given the nodes that were placed before it."""
    if target.fuses is not None and node.op_type not in target.fuses:
        return False
    if placement.half and node.op_type == "Concat":
        # Nor does it read decoded tensors then: qdq/activations.py says why.
        return False
    if node.op_type in PRODUCTS and target.float_output and not is_constant(node.inputs[1]):
        return False
    if node.op_type not in target.follows:
        return True
    quantized = set(placement.nodes)
    producers = [value.producer() for value in live_inputs(node)]
    return bool(producers) and all(
        producer is not None and producer in quantized and producer.op_type not in target.float_output
        for producer in producers
    )


# Before a logarithm ---------------------------------------------------------------------------------------------------


KEEPS_ORDERS = {"Abs", "Add", "Cast", "Div", "Max", "Min", "Mul", "Neg", "Pow", "ReduceL2", "ReduceMean", "ReduceSum",
                "ReduceSumSquare", "Sqrt", "Sub", "Where"}  # fmt: skip
"""Op types whose output spans as many orders of magnitude as their input; a saturation, as a Softmax, limits both."""
_LEAST_ORDERS = 256.0
"""Upper over lower bound of a Clip from which on its output spans orders: one scale of 8 bits serves less."""
KEEPS_ORDERS |= {name for name, rule in RULES.items() if rule.shares_scale} | set(DYNAMIC_KERNELS)


def nodes_before_log(graph: ir.Graph) -> set[ir.Node]:
    """The layers of a graph whose products reach a Log through sums, powers and other layers."""
    reached: set[ir.Node] = set()
    waiting = [node.inputs[0] for node in graph if is_op(node, "Log")]
    while waiting:
        value = waiting.pop()
        node = None if value is None else value.producer()
        if node is not None and node not in reached and keeps_orders(node):
            reached.add(node)
            waiting.extend(node.inputs)
    return {node for node in reached if node.op_type in DYNAMIC_KERNELS}


def keeps_orders(node: ir.Node) -> bool:
    """Return True where the output of a node spans what its input spans, as that of a Clip with bounds far apart."""
    if is_op(node, "Clip"):
        low, high = _bound(node, 1, "min"), _bound(node, 2, "max")
        return low is None or high is None or low <= 0 or high > _LEAST_ORDERS * low
    return node.domain in ("", "ai.onnx") and node.op_type in KEEPS_ORDERS


def _bound(node: ir.Node, index: int, name: str) -> float | None:
    """A bound of a Clip, an input or an attribute; None where there is none, or it is computed."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is not None:
        return float(constant(value).reshape(-1)[0]) if is_constant(value) and constant(value).size else None
    return node.attributes.get_float(name) if name in node.attributes else None
