"""The constants of a graph that channels lie along: weights, biases and gains, found and changed along one axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray, row_chunks
from quark.onnx.graph.edit import is_op, read_once, set_initializer
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.operators import PRODUCTS, input_axis, output_axis
from quark.onnx_ops.graph_writer import add_constant

CHUNK_BYTES = 1 << 26


def is_linear(node: ir.Node | None) -> bool:
    """Return True where a node multiplies its input by a constant matrix."""
    if node is None or not is_op(node, *PRODUCTS) or len(node.inputs) < 2:
        return False
    weight = node.inputs[1]
    matrix = is_constant(weight) and weight is not None and weight.shape is not None and len(weight.shape) == 2
    return matrix and not is_constant(node.inputs[0]) and not node.attributes.get_int("transA", 0)


def output_channels(layer: ir.Node) -> int:
    """How many output channels a layer with constant weight has."""
    groups = layer.attributes.get_int("group", 1) if is_op(layer, "ConvTranspose") else 1
    return int(constant(layer.inputs[1]).shape[output_axis(layer)]) * groups


@dataclass(frozen=True)
class ChannelConstant:
    """A constant input of a node, with the axis that its channels lie along.

    Attributes:
        node, index: The node, and which of its inputs.
        axis: The axis.
    """

    node: ir.Node
    index: int
    axis: int = -1

    @property
    def value(self) -> ir.Value:
        """The input."""
        value = self.node.inputs[self.index]
        assert value is not None
        return value

    @property
    def array(self) -> NumpyArray:
        """The constant, with at least one axis."""
        return np.atleast_1d(constant(self.value))

    @property
    def size(self) -> int:
        """How many channels it has; 1 for one value that serves all."""
        return int(self.array.shape[self.axis])

    def along(self, vector: NumpyArray) -> NumpyArray:
        """A vector over the channels, (channels,), in the shape that broadcasts over the constant."""
        shape = [1] * self.array.ndim
        shape[self.axis] = -1
        return vector.reshape(shape)

    def multiply(self, scale: NumpyArray) -> None:
        """Multiply each channel by a scale, (channels,); one value for all channels becomes one for each.

        Other nodes that read the constant keep theirs.
        """
        array = self.array
        set_initializer(unshared(self.node, self.index), (array * self.along(scale)).astype(array.dtype))

    def change(self, function: Callable[[NumpyArray], NumpyArray], channels: int) -> None:
        """Let a function map rows of channels, (rows, channels) in float64; a single value stands for all channels."""
        array = self.array
        if array.shape[self.axis] == 1:
            array = np.repeat(array, channels, axis=self.axis)
        new = np.empty_like(array)
        source, target = np.moveaxis(array, self.axis, -1), np.moveaxis(new, self.axis, -1)
        if source.ndim == 1:
            target[...] = function(source[None].astype(np.float64))[0]
        else:
            for rows in row_chunks(len(source), source[0].size * 8, CHUNK_BYTES):
                part = source[rows].astype(np.float64)
                target[rows] = function(part.reshape(-1, channels)).reshape(part.shape)
        set_initializer(unshared(self.node, self.index), new)


def weight_by_input(layer: ir.Node) -> ChannelConstant:
    """The weight of a layer, along its input channels."""
    return ChannelConstant(layer, 1, input_axis(layer))


def weight_by_output(layer: ir.Node) -> ChannelConstant:
    """The weight of a layer, along its output channels."""
    return ChannelConstant(layer, 1, output_axis(layer))


def output_constants(layer: ir.Node) -> tuple[ChannelConstant, ...]:
    """The constants of a linear layer that hold its output channels: its weight, and the bias of a Gemm."""
    biased = len(layer.inputs) > 2 and layer.inputs[2] is not None
    return (weight_by_output(layer), *((ChannelConstant(layer, 2),) if biased else ()))


def _added_constant(value: ir.Value) -> tuple[ir.Node, int] | None:
    """The Add of a constant that alone reads a value, and which of its inputs the constant is."""
    if not read_once(value):
        return None
    ((reader, index),) = value.uses()
    other = 1 - index
    return (reader, other) if is_op(reader, "Add") and is_constant(reader.inputs[other]) else None


def added_bias(value: ir.Value, channels: int) -> ChannelConstant | None:
    """Return the bias that an Add, the only reader of a value, gives its channels, which are its last axis; or None."""
    added = _added_constant(value)
    bias = None if added is None else ChannelConstant(*added)
    fits = bias is not None and constant(bias.value).shape in ((channels,), (1, channels), (1, 1, channels))
    return bias if fits else None


def matmul_bias(node: ir.Node) -> tuple[ir.Node, int] | None:
    """The Add that alone reads a MatMul and adds a constant vector, and which of its inputs that is."""
    added = _added_constant(node.outputs[0]) if node.op_type == "MatMul" else None
    return added if added is not None and constant(added[0].inputs[added[1]]).ndim == 1 else None


def bias_of(layer: ir.Node) -> ChannelConstant | None:
    """The bias of a linear layer: of a Gemm, or what an Add that alone reads the layer gives each channel."""
    _, *biases = output_constants(layer)
    return biases[0] if biases else added_bias(layer.outputs[0], weight_by_output(layer).size)


def unshared(node: ir.Node, index: int) -> ir.Value:
    """A constant input as an initializer that nothing else reads: itself, or a copy."""
    value = node.inputs[index]
    assert value is not None and node.graph is not None
    if value.const_value is not None and value.is_initializer() and len(value.uses()) == 1:
        return value
    copy = add_constant(node.graph, f"{value.name}_{node.name}", constant(value))
    node.replace_input_with(index, copy)
    return copy
