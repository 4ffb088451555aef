"""Folds what multiplies or adds a constant to each channel into the Conv, ConvTranspose or Gemm before it.

    W' = W * f        b' = b * f + s
    BatchNormalization      f = gamma / sqrt(var + eps)     s = beta - mean * f
    Mul, Div, Add, Sub      x * c    x / c    x + c    x - c, and the same with x second but for Div

The last four behind convolutions only, for one constant, or one for each channel. A BatchNormalization behind a Concat
is folded into all that the Concat joins. Not folded: a convolution whose output or whose weight anything else reads
(its float values would change there).
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.onnx.graph.channels import output_channels, weight_by_output
from quark.onnx.graph.edit import is_op, prune, read_once, set_initializer
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx_ops.graph_writer import add_constant, redirect

Affine = tuple[NumpyArray, NumpyArray]
"""Factor and shift of each channel, in float64."""

ARITHMETIC = ("Mul", "Div", "Add", "Sub")
FOLDS_INTO = ("Conv", "ConvTranspose", "Gemm")


def fold_batch_norm(model: ir.Model) -> int:
    """Fold every BatchNormalization, and every constant that is multiplied or added, that can be; return how many."""
    count = 0
    for norm in [node for node in model.graph if is_op(node, "BatchNormalization", *ARITHMETIC)]:
        source = norm.inputs[1] if is_op(norm, *ARITHMETIC) and is_constant(norm.inputs[0]) else norm.inputs[0]
        producer = source.producer() if source is not None else None
        if source is None or producer is None or not read_once(source):
            continue
        affine = affine_of(norm) if is_op(norm, "BatchNormalization") else _arithmetic(norm, producer)
        if affine is None:
            continue
        members, name = _members(producer, affine), norm.outputs[0].name
        if members is None or not redirect(norm.outputs[0], source):
            continue
        for node, (factor, shift) in members:
            _fold(model.graph, node, factor, shift)
            if node is not producer:
                node.outputs[0].name = f"{node.outputs[0].name}_normalized"
        prune(norm)
        # A name stands for the same values as in the user's model: reports and statistics go by it.
        source.name = name
        count += 1
    return count


def affine_of(norm: ir.Node) -> Affine | None:
    """What a BatchNormalization multiplies and adds; None where a parameter is no constant, or in training mode."""
    parameters = [constant(value) for value in norm.inputs[1:5]]
    if any(p is None for p in parameters) or norm.attributes.get_int("training_mode") or len(norm.outputs) != 1:
        return None
    gamma, beta, mean, variance = (p.astype(np.float64) for p in parameters)
    factor = gamma / np.sqrt(variance + norm.attributes.get_float("epsilon", 1e-5))
    return factor, beta - mean * factor


def _arithmetic(node: ir.Node, layer: ir.Node) -> Affine | None:
    """What a Mul, Div, Add or Sub does to each channel of a convolution; None where that is not linear, or no constant.

    A constant with more axes than the convolution's output, or with several values along another axis, is none.
    """
    index = 0 if is_constant(node.inputs[0]) else 1
    if not is_op(layer, "Conv", "ConvTranspose") or not _can_fold(layer) or not is_constant(node.inputs[index]):
        return None
    if index == 0 and is_op(node, "Div"):
        return None
    array, channels, rank = constant(node.inputs[index]), output_channels(layer), constant(layer.inputs[1]).ndim
    padded = (1,) * (rank - array.ndim) + array.shape
    if array.ndim > rank or padded[0] != 1 or padded[1] not in (1, channels) or math.prod(padded[2:]) != 1:
        return None
    if array.dtype != constant(layer.inputs[1]).dtype:
        return None
    values = np.broadcast_to(array.astype(np.float64).reshape(-1), channels)
    if is_op(node, "Add"):
        return np.ones(channels), values
    if is_op(node, "Sub"):
        return np.full(channels, 1.0 if index else -1.0), -values if index else values
    if is_op(node, "Div"):
        return (1 / values, np.zeros(channels)) if values.all() else None
    return values, np.zeros(channels)


def _members(producer: ir.Node, affine: Affine) -> list[tuple[ir.Node, Affine]] | None:
    """The nodes to fold into, each with its channels' share; None where one of them cannot be."""
    if is_op(producer, *FOLDS_INTO):
        return [(producer, affine)] if _can_fold(producer) else None
    if not is_op(producer, "Concat") or producer.attributes["axis"].as_int() != 1:
        return None
    branches = [value.producer() for value in producer.inputs if value is not None and read_once(value)]
    nodes = [node for node in branches if node is not None and is_op(node, "Conv", "ConvTranspose")]
    if len(nodes) != len(producer.inputs) or not all(map(_can_fold, nodes)):
        return None
    ends = np.cumsum([output_channels(node) for node in nodes])[:-1]
    return list(zip(nodes, zip(*(np.split(array, ends) for array in affine), strict=True), strict=True))


def _can_fold(node: ir.Node) -> bool:
    """Whether the weight and bias of a node may be changed."""
    weight = node.inputs[1]
    if weight is None or weight.const_value is None or not read_once(weight):
        return False
    if len(node.inputs) > 2 and node.inputs[2] is not None and constant(node.inputs[2]) is None:
        return False
    if node.op_type == "ConvTranspose" and node.attributes.get_int("group", 1) != 1:
        return False
    return node.op_type != "Gemm" or node.attributes.get_float("beta", 1.0) == 1.0


def _fold(graph: ir.Graph, node: ir.Node, factor: NumpyArray, shift: NumpyArray) -> None:
    bias_value = node.inputs[2] if len(node.inputs) > 2 else None
    weight, bias = weight_by_output(node), constant(bias_value)
    weight.multiply(factor)
    shifted = (shift if bias is None else bias * factor + shift).astype(weight.array.dtype)
    if bias_value is not None and bias_value.const_value is not None and read_once(bias_value):
        set_initializer(bias_value, shifted)
        return
    node.resize_inputs(3)
    node.replace_input_with(2, add_constant(graph, f"{node.name}_bias", shifted))
