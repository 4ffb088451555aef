"""CLE, cross-layer equalization, of an ONNX model: pairs of layers are found, and their channels rescaled.

A pair is a layer with constant weight, ops f with f(s x) = s f(x) for positive s of each channel, and another layer
with constant weight, each read by the next alone: Conv (also depthwise), ConvTranspose, Gemm and MatMul, with Relu,
LeakyRelu, PRelu, pooling, a mean over positions, zero padding, a constant factor, a bias, or Flatten of one position
between. A tensor may also be read by two, whose results are multiplied:

    hard-swish, SiLU     x g(x)            ->  x' g(x' / s)     one Mul before g; s is a power of two from 1/8 to 8, so
                                                                that 8 bits hold 1 / s of all channels
    squeeze, excitation  x g(W mean(x))    ->  x' g(W' mean(x'))     W' = W / s

Both are exact. A Clip is not homogeneous where it has an upper bound: no pair goes through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.core.solvers.equalize import channel_range, equalizing_scale
from quark.errors import ConfigError
from quark.onnx.algorithms.rescaling.gates import gate_of, is_pointwise, read_as_it_was
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.config.algo_configs import CLEConfig
from quark.onnx.config.settings import Settings
from quark.onnx.graph.channels import ChannelConstant, added_bias, output_channels, weight_by_input, weight_by_output
from quark.onnx.graph.edit import axes_of, dims, is_op, read_once, set_initializer
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.operators import HOMOGENEOUS, LAYERS, result_axis

_WIDEST = 8.0
"""Factor of a channel, or one over it, before a gate."""
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
        gates: (node, input index) of the gates between them, which read their tensor as it was.
        means: Weights of other layers that read the channels, along these.
    """

    first: ChannelConstant
    second: ChannelConstant
    biases: tuple[ChannelConstant, ...]
    between: tuple[tuple[ir.Value, int | None], ...]
    gates: tuple[tuple[ir.Node, int], ...] = ()
    means: tuple[ChannelConstant, ...] = ()

    @property
    def is_gated(self) -> bool:
        """True where a tensor between them is multiplied by what is computed of it."""
        return bool(self.gates or self.means)


def equalize(model: ir.Model, config: CLEConfig, settings: Settings, data: Samples | None = None) -> int:
    """Equalize every pair; return how many there are. Raises ConfigError for an unknown balance method, or no steps."""
    return len(equalized_pairs(model, config, settings))


def equalized_pairs(model: ir.Model, config: CLEConfig, settings: Settings) -> list[tuple[Pair, NumpyArray]]:
    """Equalize a model; return the pairs of layers, and the factors of the channels of the tensors between them."""
    if config.cle_balance_method != "max":
        raise ConfigError(f"cle_balance_method={config.cle_balance_method!r}; possible: 'max'.")
    if config.cle_steps < 1 and config.cle_steps != -1:
        raise ConfigError(f"cle_steps={config.cle_steps}; possible: from 1, or -1 for until nothing changes.")
    known = [pair for node in model.graph if (pair := _pair(node)) is not None]
    pairs = [pair for pair in known if config.cle_through_gates or not pair.is_gated]
    scales = _balanced(pairs, config, not settings.specs.int32_bias)
    found = list(zip(pairs, scales, strict=True))
    for gate, scale in [(gate, scale) for pair, scale in found if np.any(scale != 1) for gate in pair.gates]:
        read_as_it_was(*gate, scale)
    return found


def _balanced(pairs: Sequence[Pair], config: CLEConfig, coarse_bias: bool) -> list[NumpyArray]:
    """Rescale pairs in as many steps as there are; return the scale of each channel of each pair."""
    scales = [np.ones(1)] * len(pairs)
    for _ in range(config.cle_steps if config.cle_steps > 0 else _MOST_STEPS):
        steps = [_balance(pair, config, coarse_bias, scale) for pair, scale in zip(pairs, scales, strict=True)]
        scales = [scale * step for scale, step in zip(scales, steps, strict=True)]
        if sum(float(np.abs(step - 1).mean()) for step in steps) < config.cle_total_layer_diff_threshold:
            break
    return scales


def _balance(pair: Pair, config: CLEConfig, coarse_bias: bool, before: NumpyArray) -> NumpyArray:
    """Rescale one pair; return the scale of each channel. An int32 bias, unlike a coarse one, has no range to mind.

    Args:
        pair: The pair.
        config: Which channels are rescaled.
        coarse_bias: Whether biases have a scale of their own.
        before: The scales of steps before.
    """
    first, second = pair.first, pair.second
    ranges = channel_range(first.array, first.axis)
    if config.cle_scale_append_bias and coarse_bias:
        # An error of the bias reaches the output once, one of a weight as often as there are inputs: as variances.
        inputs = first.array.size / len(ranges)
        squares = sum(bias.array.reshape(-1).astype(np.float64) ** 2 for bias in pair.biases)
        ranges = np.sqrt(ranges**2 + squares / inputs)
    threshold = config.cle_weight_threshold if config.cle_scale_use_threshold else 0.0
    scale = equalizing_scale(ranges, channel_range(second.array, second.axis), threshold)
    if pair.gates:
        scale = (2 ** np.round(np.log2(scale * before))).clip(1 / _WIDEST, _WIDEST) / before
    for part in (first, *pair.biases):
        part.multiply(scale)
    for part in (second, *pair.means):
        part.multiply(1 / scale)
    return scale


def _pair(node: ir.Node) -> Pair | None:
    """The pair whose first layer is this node."""
    if not _is_layer(node):
        return None
    biases = [ChannelConstant(node, 2)] if len(node.inputs) > 2 and node.inputs[2] is not None else []
    # A layer reads channels along the axis that it writes its own along.
    way = _Way(node.outputs[0], result_axis(node), output_channels(node), biases)
    while True:
        way.between.append((way.value, way.axis))
        if not read_once(way.value):
            if not way.passes_gate():
                return None
            continue
        ((reader, index),) = way.value.uses()
        if index == 0 and _reads_channels(reader, way.axis, way.channels):
            return way.pair(weight_by_output(node), _second(reader))
        if not way.passes(reader, index):
            return None


@dataclass
class _Way:
    """The way from a layer to the next.

    Attributes:
        value: The tensor that was reached.
        axis: Along which its channels lie; None where they lie along none.
        channels: How many there are.
        biases, between, gates, means: See `Pair`.
    """

    value: ir.Value
    axis: int | None
    channels: int
    biases: list[ChannelConstant]
    between: list[tuple[ir.Value, int | None]] = field(default_factory=list)
    gates: list[tuple[ir.Node, int]] = field(default_factory=list)
    means: list[ChannelConstant] = field(default_factory=list)

    def pair(self, first: ChannelConstant, second: ChannelConstant) -> Pair | None:
        """The pair of the two layers; None where a bias may not be changed."""
        whole = all(_is_unshared(bias.value) and bias.array.size in (1, self.channels) for bias in self.biases)
        lists = (self.biases, self.between, self.gates, self.means)
        return Pair(first, second, *map(tuple, lists)) if whole else None  # type: ignore[arg-type]

    def passes(self, reader: ir.Node, index: int) -> bool:
        """Go on over the only reader; False where factors of channels do not pass it."""
        along = added_bias(self.value, self.channels) if self.axis == -1 else None
        bias = along or _added_to_channels(reader, index, self.axis, self.channels)
        if bias is not None:
            self.biases.append(bias)
        elif is_op(reader, "Flatten") and _is_one_position(self.value):
            self.axis = -1
        elif is_op(reader, "HardSwish") and self.axis == 1 and dims(self.value) is not None:
            self.gates.append((reader, 0))
        elif not _keeps_scale(reader, index, self.axis):
            return False
        self.value = reader.outputs[0]
        return True

    def passes_gate(self) -> bool:
        """Go on over the product with what is computed of the tensor; False where something else reads it."""
        found = gate_of(self.value) if self.axis == 1 else None
        if found is None:
            return False
        gate, index, product = found
        if is_pointwise(gate):
            self.gates.append((gate, index))
        else:
            layer = _layer_after_mean(gate, index, self.channels)
            if layer is None:
                return False
            self.means.append(_second(layer))
        self.value = product
        return True


def _layer_after_mean(mean: ir.Node, index: int, channels: int) -> ir.Node | None:
    """Return the layer that alone reads the mean over positions of a tensor of channels; None where there is none."""
    averages = is_op(mean, "GlobalAveragePool") or (is_op(mean, "ReduceMean") and _keeps_scale(mean, index, 1))
    if not averages or not read_once(mean.outputs[0]):
        return None
    ((layer, position),) = mean.outputs[0].uses()
    return layer if position == 0 and is_op(layer, "Conv") and _reads_channels(layer, 1, channels) else None


def _added_to_channels(node: ir.Node, index: int, axis: int | None, channels: int) -> ChannelConstant | None:
    """Return the constant that a node adds to a tensor of channels along the axis 1: a number, or one for each."""
    shape, added = dims(node.inputs[index]), node.inputs[1 - index] if is_op(node, "Add") else None
    if axis != 1 or shape is None or added is None or not _is_unshared(added):
        return None
    lead, array = -(len(shape) - 1), constant(added)
    if array.size == 1 and array.ndim < len(shape):
        set_initializer(added, array.reshape([1] * (len(shape) - 1)))
        return ChannelConstant(node, 1 - index, lead)
    fits = array.size == channels and len(shape) - 1 <= array.ndim <= len(shape) and array.shape[lead] == channels
    return ChannelConstant(node, 1 - index, lead) if fits else None


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
    if is_op(node, *HOMOGENEOUS, "PRelu") or (is_op(node, "Mul", "Div") and _is_positive_number(node.inputs[1])):
        return True
    if axis == 1 and is_op(node, "ReduceMean"):
        shape, axes = dims(node.inputs[0]), axes_of(node)
        if shape is None or axes is None or not node.attributes.get_int("keepdims", 1):
            return False
        return all(one % len(shape) > 1 for one in axes)
    return axis == 1 and is_op(node, "Pad") and _pads_positions(node)


def _is_positive_number(value: ir.Value | None) -> bool:
    return value is not None and is_constant(value) and constant(value).size == 1 and bool(np.all(constant(value) > 0))


def _pads_positions(pad: ir.Node) -> bool:
    """Return True where what is added at the ends of positions is a value of them, or zero."""
    pads = constant(pad.inputs[1]) if len(pad.inputs) > 1 else None
    if pads is None or pads.reshape(2, -1)[:, :2].any() or len(pad.inputs) > 3:
        return False
    values = [constant(value) for value in pad.inputs[2:3] if value is not None]
    zero = all(value is not None and not np.any(value) for value in values)
    return zero or pad.attributes.get_string("mode", "constant") != "constant"
