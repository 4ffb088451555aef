"""Folds what multiplies or adds a constant to each channel into the Conv, ConvTranspose or Gemm before it.

    W' = W * f        b' = b * f + s
    BatchNormalization      f = gamma / sqrt(var + eps)     s = beta - mean * f
    Mul, Div, Add, Sub      x * c    x / c    x + c    x - c, and the same with x second but for Div

The last four after convolutions only, for one constant, or one for each channel. What stands after a Concat is folded
into all that the Concat joins: a positive factor through what gives on factors, too (Relu, pools), and where it can be
folded into some of them, the others get a Mul or Add of their own. Each then has its own range where it is quantized.
Not folded: a convolution whose output or whose weight anything else reads (its float values would change there).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.onnx.graph.channels import output_channels, weight_by_output
from quark.onnx.graph.edit import dims, insert, is_op, prune, read_once, set_initializer
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.operators import BIASED, HOMOGENEOUS
from quark.onnx_ops.graph_writer import add_constant, redirect

Affine = tuple[NumpyArray, NumpyArray]
"""Factor and shift of each channel, in float64."""

_ARITHMETIC = ("Mul", "Div", "Add", "Sub")


@dataclass(frozen=True)
class _Member:
    """A part of the channels that a factor and a shift are of.

    Attributes:
        node: The layer to fold into; or the Concat that reads what they are written before.
        affine: Of its channels.
        index: Which input of the Concat; None for a layer.
        after: The values between the layer and the Concat, which change.
    """

    node: ir.Node
    affine: Affine
    index: int | None = None
    after: tuple[ir.Value, ...] = ()


def fold_batch_norm(model: ir.Model) -> int:
    """Fold every BatchNormalization, and every constant that is multiplied or added, that can be; return how many."""
    count = 0
    for norm in [node for node in model.graph if is_op(node, "BatchNormalization", *_ARITHMETIC)]:
        source, members = _target(norm)
        name = norm.outputs[0].name
        if source is None or not redirect(norm.outputs[0], source):
            continue
        for member in members:
            _write_member(model.graph, member)
        prune(norm)
        # A name stands for the same values as in the user's model: reports and statistics go by it.
        source.name = name
        count += 1
    return count


def affine_of(norm: ir.Node) -> Affine | None:
    """Return what a BatchNormalization multiplies by and adds; None in training, or without constant parameters."""
    parameters = [constant(value) for value in norm.inputs[1:5]]
    if any(p is None for p in parameters) or norm.attributes.get_int("training_mode") or len(norm.outputs) != 1:
        return None
    gamma, beta, mean, variance = (p.astype(np.float64) for p in parameters)
    factor = gamma / np.sqrt(variance + norm.attributes.get_float("epsilon", 1e-5))
    return factor, beta - mean * factor


def _target(node: ir.Node) -> tuple[ir.Value | None, list[_Member]]:
    """Return what a node normalizes, scales or adds to, and the parts that it folds into: None and none if it stays."""
    source = node.inputs[1] if is_op(node, *_ARITHMETIC) and is_constant(node.inputs[0]) else node.inputs[0]
    producer = source.producer() if source is not None and read_once(source) else None
    if source is None or producer is None:
        return None, []
    affine = affine_of(node) if is_op(node, "BatchNormalization") else _arithmetic(node, source, producer)
    members: list[_Member] = []
    if affine is not None and is_op(producer, *BIASED):
        members = [_Member(producer, affine)] if _can_fold(producer) else []
    elif affine is not None and _joins_channels(producer):
        members = _branches(producer, affine)
    return (source if any(member.index is None for member in members) else None), members


def _arithmetic(node: ir.Node, source: ir.Value, producer: ir.Node) -> Affine | None:
    """Return what a Mul, Div, Add or Sub does to each channel of a convolution, or of what a Concat joins.

    None where that is not linear, or no constant. A constant with more axes than the tensor, or with several values
    along another axis, is none.
    """
    index = 0 if is_constant(node.inputs[0]) else 1
    array = constant(node.inputs[index])
    if array is None or (index == 0 and is_op(node, "Div")):
        return None
    known = _channels(source, producer, array.dtype)
    if known is None:
        return None
    channels, rank, kind = known
    if array.dtype != kind or kind.kind != "f" or not _is_per_channel(array, rank, channels):
        return None
    values = np.broadcast_to(array.astype(np.float64).reshape(-1), channels)
    if is_op(node, "Div"):
        return (1 / values, np.zeros(channels)) if values.all() else None
    if is_op(node, "Sub"):
        return np.full(channels, 1.0 if index else -1.0), -values if index else values
    return (np.ones(channels), values) if is_op(node, "Add") else (values, np.zeros(channels))


def _channels(source: ir.Value, producer: ir.Node, dtype: np.dtype[Any]) -> tuple[int, int, np.dtype[Any]] | None:
    """How many channels a convolution or a Concat writes, in how many axes, and the type of a weight, else `dtype`."""
    if is_op(producer, "Conv", "ConvTranspose") and _can_fold(producer):
        weight = constant(producer.inputs[1])
        return output_channels(producer), weight.ndim, weight.dtype
    shape = dims(source) if is_op(producer, "Concat") else None
    return (shape[1], len(shape), dtype) if shape and len(shape) > 2 and shape[1] is not None else None


def _is_per_channel(array: NumpyArray, rank: int, channels: int) -> bool:
    """Return True where a constant has one value, or one of each channel, beside a tensor of so many axes."""
    padded = (1,) * (rank - array.ndim) + array.shape
    return array.ndim <= rank and padded[0] == 1 and padded[1] in (1, channels) and math.prod(padded[2:]) == 1


def _write_member(graph: ir.Graph, member: _Member) -> None:
    """Fold a factor and a shift into a layer, or write them before a Concat."""
    if member.index is not None:
        _write(graph, member.node, member.index, member.affine)
        return
    _fold(graph, member.node, *member.affine)
    for value in member.after:
        value.name = f"{value.name}_normalized"


def _joins_channels(node: ir.Node) -> bool:
    """Return True where a node is a Concat of channels, of which each part has a known number."""
    sizes = [dims(value) for value in node.inputs] if is_op(node, "Concat") else []
    if not all(shape and len(shape) > 2 and shape[1] is not None for shape in sizes):
        return False
    return bool(sizes) and node.attributes["axis"].as_int() % len(sizes[0] or ()) == 1


def _branches(concat: ir.Node, affine: Affine) -> list[_Member]:
    """The parts of a Concat: each a layer, with what gives its factors on, or the edge into the Concat."""
    sizes = [(dims(value) or [])[1] or 0 for value in concat.inputs]
    members: list[_Member] = []
    parts = zip(*(np.split(array, np.cumsum(sizes)[:-1]) for array in affine), strict=True)
    for index, (value, part) in enumerate(zip(concat.inputs, parts, strict=True)):
        assert value is not None
        members += _branch(value, part, ()) or [_Member(concat, part, index)]
    return members


def _branch(value: ir.Value, affine: Affine, after: tuple[ir.Value, ...]) -> list[_Member]:
    """The layers that write one part; none where it cannot be changed."""
    node, (factor, shift) = value.producer(), affine
    if node is None or not read_once(value):
        return []
    after = (*after, value)
    if is_op(node, "Conv", "ConvTranspose"):
        return [_Member(node, affine, after=after)] if _can_fold(node) else []
    if is_op(node, *HOMOGENEOUS) and len(node.outputs) == 1 and (factor > 0).all() and not shift.any():
        source = node.inputs[0]
        return [] if source is None else _branch(source, affine, after)
    return []


def _write(graph: ir.Graph, concat: ir.Node, index: int, affine: Affine) -> None:
    """Multiply and add on one edge into a Concat."""
    value = concat.inputs[index]
    assert value is not None and value.dtype is not None
    shape = (-1, *[1] * (len(dims(value) or ()) - 2))
    for op_type, array, nothing in (("Mul", affine[0], 1), ("Add", affine[1], 0)):
        if (array == nothing).all():
            continue
        name = f"{concat.name}_{index}_{op_type}"
        operand = add_constant(graph, f"{name}_operand", array.astype(value.dtype.numpy()).reshape(shape))
        output = insert(concat, op_type, [value, operand], {}, name)
        output.type, output.shape = value.type, value.shape
        value = output
    concat.replace_input_with(index, value)


def _can_fold(node: ir.Node) -> bool:
    """Return True where the weight and bias of a node may be changed."""
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
