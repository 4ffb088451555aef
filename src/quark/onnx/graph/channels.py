"""Channels of layers: the axes of constants that they lie along, and constants that are changed along them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.core.array import row_chunks
from quark.onnx.graph.edit import is_op, new_initializer, read_once, set_initializer
from quark.onnx.graph.model_file import constant, is_constant

Array = np.ndarray[Any, Any]
LINEAR = ("Gemm", "MatMul")
LAYERS = ("Conv", "ConvTranspose", *LINEAR)
CHUNK_BYTES = 1 << 26


def output_axis(layer: ir.Node) -> int:
    """Axis of a layer's weight along which its outputs lie."""
    return {"Conv": 0, "ConvTranspose": 1, "MatMul": 1}.get(layer.op_type, 1 - _transposed(layer))


def input_axis(layer: ir.Node) -> int:
    """Axis of a layer's weight along which its inputs lie; of a depthwise Conv the only one that channels have."""
    if is_op(layer, "Conv"):
        return 0 if layer.attributes.get_int("group", 1) > 1 else 1
    return {"ConvTranspose": 0, "MatMul": 0}.get(layer.op_type, _transposed(layer))


def _transposed(layer: ir.Node) -> int:
    return layer.attributes.get_int("transB", 0)


def is_linear(node: ir.Node | None) -> bool:
    """Whether a node multiplies its input by a constant matrix."""
    if node is None or not is_op(node, *LINEAR) or len(node.inputs) < 2:
        return False
    weight = node.inputs[1]
    matrix = is_constant(weight) and weight is not None and weight.shape is not None and len(weight.shape) == 2
    return matrix and not is_constant(node.inputs[0]) and not node.attributes.get_int("transA", 0)


@dataclass(frozen=True)
class Place:
    """A constant input of a node, with the axis that its channels lie along."""

    node: ir.Node
    index: int
    axis: int = -1

    @property
    def array(self) -> Array:
        """The constant, with at least one axis."""
        return np.atleast_1d(constant(self.node.inputs[self.index]))

    @property
    def size(self) -> int:
        """How many channels it has; 1 for one value that serves all."""
        return int(self.array.shape[self.axis])

    def multiply(self, scale: Array) -> None:
        """Multiply each channel by a scale, (channels,). Other nodes that read the constant keep theirs."""
        multiply(own(self.node, self.index), scale, self.axis)

    def change(self, function: Callable[[Array], Array], channels: int) -> None:
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
        set_initializer(own(self.node, self.index), new)


def linear_places(node: ir.Node) -> tuple[Place, ...]:
    """The constants that hold the output channels of a linear layer: its weight, and the bias of a Gemm."""
    biased = len(node.inputs) > 2 and node.inputs[2] is not None
    return (Place(node, 1, output_axis(node)), *((Place(node, 2),) if biased else ()))


def bias_beside(node: ir.Node, index: int, channels: int) -> Place | None:
    """The constant that an Add gives each channel beside its input `index`, as after a MatMul."""
    other = node.inputs[1 - index] if is_op(node, "Add") else None
    if other is None or not is_constant(other):
        return None
    shape = constant(other).shape
    return Place(node, 1 - index) if shape in ((channels,), (1, channels), (1, 1, channels)) else None


def bias_of(layer: ir.Node) -> Place | None:
    """The bias of a linear layer: of a Gemm, or what an Add that alone reads the layer gives each channel."""
    own_bias = linear_places(layer)[1:]
    if own_bias or not read_once(layer.outputs[0]):
        return own_bias[0] if own_bias else None
    ((reader, index),) = layer.outputs[0].uses()
    return bias_beside(reader, index, Place(layer, 1, output_axis(layer)).size)


def own(node: ir.Node, index: int) -> ir.Value:
    """A constant input as an initializer that nothing else reads: itself, or a copy."""
    value = node.inputs[index]
    assert value is not None and node.graph is not None
    if value.const_value is not None and value.is_initializer() and len(value.uses()) == 1:
        return value
    copy = new_initializer(node.graph, f"{value.name}_{node.name}", constant(value))
    node.replace_input_with(index, copy)
    return copy


def multiply(value: ir.Value, scale: Array, axis: int) -> None:
    """Multiply each channel of an initializer by a scale; one value for all channels becomes one for each."""
    array = np.atleast_1d(constant(value))
    shape = [1] * array.ndim
    shape[axis] = -1
    set_initializer(value, (array * scale.reshape(shape)).astype(array.dtype))
