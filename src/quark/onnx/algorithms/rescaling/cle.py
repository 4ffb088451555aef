"""CLE, cross-layer equalization, of an ONNX model: pairs of layers are found, and their channels rescaled.

A pair is a layer with constant weight, ops f with f(s x) = s f(x) for positive s of each channel, and another layer
with constant weight, each read by the next alone: Conv (also depthwise), ConvTranspose, Gemm and MatMul, with Relu,
LeakyRelu, PRelu, pooling, a mean over positions, zero padding, a bias, or Flatten of one position between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.core.solvers.equalize import channel_range, equalizing_scale
from quark.errors import ConfigError
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.config.algo_configs import CLEConfig
from quark.onnx.config.settings import Settings
from quark.onnx.graph.channels import ChannelConstant, added_bias, output_channels, weight_by_input, weight_by_output
from quark.onnx.graph.edit import axes_of, dims, is_op, read_once
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.operators import HOMOGENEOUS, LAYERS, result_axis

_MOST_STEPS = 100
"""Of `cle_steps=-1`, which goes on until nothing changes any more."""


@dataclass(frozen=True)
class Pair:
    """Two layers whose channels share a scale.

    Attributes:
        first: The weight of the first layer, along its output channels.
        second: The weight of the second, along its input channels.
        biases: The constants between them that are biases of the first.
        between: The tensors between them, and the axis of their channels, where they have one.
    """

    first: ChannelConstant
    second: ChannelConstant
    biases: tuple[ChannelConstant, ...]
    between: tuple[tuple[ir.Value, int | None], ...]


def equalize(model: ir.Model, config: CLEConfig, settings: Settings, data: Samples | None = None) -> int:
    """Equalize every pair; return how many there are. Raises ConfigError for an unknown balance method, or no steps."""
    return len(equalized_pairs(model, config, settings))


def equalized_pairs(model: ir.Model, config: CLEConfig, settings: Settings) -> list[tuple[Pair, NumpyArray]]:
    """Equalize a model; return the pairs of layers, and the factors of the channels of the tensors between them."""
    if config.cle_balance_method != "max":
        raise ConfigError(f"cle_balance_method={config.cle_balance_method!r}; possible: 'max'.")
    if config.cle_steps < 1 and config.cle_steps != -1:
        raise ConfigError(f"cle_steps={config.cle_steps}; possible: from 1, or -1 for until nothing changes.")
    pairs = [pair for node in model.graph if (pair := _pair(node)) is not None]
    scales = [np.ones(1)] * len(pairs)
    for _ in range(config.cle_steps if config.cle_steps > 0 else _MOST_STEPS):
        steps = [_balance(pair, config, not settings.specs.int32_bias) for pair in pairs]
        scales = [scale * step for scale, step in zip(scales, steps, strict=True)]
        if sum(float(np.abs(step - 1).mean()) for step in steps) < config.cle_total_layer_diff_threshold:
            break
    return list(zip(pairs, scales, strict=True))


def _balance(pair: Pair, config: CLEConfig, coarse_bias: bool) -> NumpyArray:
    """Rescale one pair; return the scale of each channel. An int32 bias, unlike a coarse one, has no range to mind."""
    first, second = pair.first, pair.second
    ranges = channel_range(first.array, first.axis)
    if config.cle_scale_append_bias and coarse_bias:
        # An error of the bias reaches the output once, one of a weight as often as there are inputs: as variances.
        inputs = first.array.size / len(ranges)
        squares = sum(bias.array.reshape(-1).astype(np.float64) ** 2 for bias in pair.biases)
        ranges = np.sqrt(ranges**2 + squares / inputs)
    threshold = config.cle_weight_threshold if config.cle_scale_use_threshold else 0.0
    scale = equalizing_scale(ranges, channel_range(second.array, second.axis), threshold)
    for part in (first, *pair.biases):
        part.multiply(scale)
    second.multiply(1 / scale)
    return scale


def _pair(node: ir.Node) -> Pair | None:
    """The pair whose first layer is this node."""
    if not _is_layer(node):
        return None
    first, channels = weight_by_output(node), output_channels(node)
    biases = [ChannelConstant(node, 2)] if len(node.inputs) > 2 and node.inputs[2] is not None else []
    # Along which axis the channels of a value lie. A layer reads them along the one that it writes its own along.
    axis, value, between = result_axis(node), node.outputs[0], list[tuple[ir.Value, int | None]]()
    while read_once(value):
        between.append((value, axis))
        ((reader, index),) = value.uses()
        if index == 0 and _reads_channels(reader, axis, channels):
            whole = all(_is_unshared(bias.value) and bias.array.size in (1, channels) for bias in biases)
            return Pair(first, _second(reader), tuple(biases), tuple(between)) if whole else None
        bias = added_bias(value, channels) if axis == -1 else None
        if bias is not None:
            biases.append(bias)
        elif is_op(reader, "Flatten") and _is_one_position(value):
            axis = -1
        elif not _keeps_scale(reader, index, axis):
            return None
        value = reader.outputs[0]
    return None


def _is_unshared(value: ir.Value) -> bool:
    """Return True where a constant may be changed: an initializer that one node reads."""
    return is_constant(value) and value.const_value is not None and len(value.uses()) == 1


def _is_layer(node: ir.Node) -> bool:
    """Return True where a node is a layer whose channels can be rescaled: dense, or depthwise."""
    if not is_op(node, *LAYERS) or node.inputs[1] is None or not _is_unshared(node.inputs[1]):
        return False
    weight, group = constant(node.inputs[1]), node.attributes.get_int("group", 1)
    if is_op(node, "Conv"):
        return bool(group == 1 or (weight.shape[1] == 1 and weight.shape[0] == group))
    if is_op(node, "ConvTranspose"):
        return group == 1
    return weight.ndim == 2 and not node.attributes.get_int("transA", 0)


def _reads_channels(node: ir.Node, axis: int | None, channels: int) -> bool:
    """Return True where a node is a layer of so many channels along this axis."""
    return _is_layer(node) and result_axis(node) == axis and _second(node).size == channels


def _second(layer: ir.Node) -> ChannelConstant:
    """The weight of the second layer of a pair along the channels that it reads: a depthwise one keeps them apart."""
    depthwise = layer.attributes.get_int("group", 1) > 1
    return weight_by_output(layer) if depthwise else weight_by_input(layer)


def _is_one_position(value: ir.Value) -> bool:
    shape = dims(value)
    return shape is not None and len(shape) > 2 and all(size == 1 for size in shape[2:])


def _keeps_scale(node: ir.Node, index: int, axis: int | None) -> bool:
    """Return True where f(s x) = s f(x) for a positive scale of each channel; channels lie along an axis of x."""
    if index != 0 or len(node.outputs) != 1:
        return False
    if is_op(node, *HOMOGENEOUS, "PRelu"):
        return True
    if axis == 1 and is_op(node, "ReduceMean"):
        shape, axes = dims(node.inputs[0]), axes_of(node)
        if shape is None or axes is None or not node.attributes.get_int("keepdims", 1):
            return False
        return all(one % len(shape) > 1 for one in axes)
    return axis == 1 and is_op(node, "Pad") and _pads_positions(node)


def _pads_positions(pad: ir.Node) -> bool:
    """Return True where what is added at the ends of positions is a value of them, or zero."""
    pads = constant(pad.inputs[1]) if len(pad.inputs) > 1 else None
    if pads is None or pads.reshape(2, -1)[:, :2].any() or len(pad.inputs) > 3:
        return False
    values = [constant(value) for value in pad.inputs[2:3] if value is not None]
    zero = all(value is not None and not np.any(value) for value in values)
    return zero or pad.attributes.get_string("mode", "constant") != "constant"
