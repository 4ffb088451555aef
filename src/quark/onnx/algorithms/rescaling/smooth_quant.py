"""SmoothQuant of an ONNX model (Xiao et al. 2022, arXiv:2211.10438); the formulas are in `core/solvers/smooth.py`.

All linear layers that read a tensor share one scale s of its channels, which multiplies the inputs of their weights.
1 / s goes into the constants before the tensor where that is exact: the gain and bias of a normalization, constant
factors and biases, the layer before, and these through what commutes with a positive scale. Where something else reads
the tensor or a value on that way, one Mul for all linear layers takes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quark.base.log import logger
from quark.core.array import NumpyArray
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.scales import qparams_from_range
from quark.core.solvers.equalize import channel_range
from quark.core.solvers.smooth import WORTH, output_noise, smoothing_scale
from quark.core.spec import TensorSpec, spec
from quark.errors import ConfigError, NonFiniteError
from quark.onnx.calibration.calibrate import collect
from quark.onnx.calibration.data.samples import Samples, required
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.algo_configs import SmoothQuantConfig
from quark.onnx.config.settings import Settings
from quark.onnx.graph.channels import ChannelConstant, is_linear, output_constants, weight_by_input
from quark.onnx.graph.edit import dims, is_op, read_once
from quark.onnx.graph.model_file import is_constant
from quark.onnx.graph.norms import fused_norm
from quark.onnx.operators import output_axis, rule_of
from quark.onnx.placement.place import place
from quark.onnx.placement.placement import FACTOR, Placement
from quark.onnx_ops.graph_writer import add_constant

_COMMUTES = ("Relu", "LeakyRelu", "PRelu", "Identity")
"""Ops f(x, ...) with f(s x) = s f(x) for positive s; pools move between positions, and are none before a MatMul."""
DYNAMIC = spec("uint8", symmetric=False)
"""The type of what DynamicQuantizeLinear gives."""


class _ChannelStatistics:
    """Smallest, largest and mean squared value of each channel, which lie along the last axis."""

    def __init__(self) -> None:
        self.count, self.low, self.high, self.squares = 0, np.inf, -np.inf, np.zeros(())

    def update(self, x: NumpyArray) -> None:
        """See one more tensor."""
        rows = x.reshape(-1, x.shape[-1]).astype(np.float32, copy=False)
        if len(rows):
            self.count += len(rows)
            self.low, self.high = np.minimum(self.low, rows.min(0)), np.maximum(self.high, rows.max(0))
            self.squares = self.squares + np.einsum("ij,ij->j", rows, rows, dtype=np.float64)

    @property
    def power(self) -> NumpyArray:
        """Mean squares."""
        return np.asarray(self.squares / max(1, self.count))


@dataclass(frozen=True)
class Group:
    """A tensor, the linear layers that read it, and how they are quantized.

    Attributes:
        value: The tensor.
        layers: The layers, in the order of the graph.
        constants: Constants to divide by s; None: a Mul is needed.
        input: Spec of the tensor.
        weights: Spec of the weight of each layer; None for one that stays in float.
    """

    value: ir.Value
    layers: tuple[ir.Node, ...]
    constants: tuple[ChannelConstant, ...] | None
    input: TensorSpec
    weights: tuple[TensorSpec | None, ...]


def smooth(model: ir.Model, config: SmoothQuantConfig, settings: Settings, data: Samples | None) -> int:
    """Smooth every tensor that linear layers read quantized; return how many there are.

    Plain 16-bit floats are not among them: a channel does not lose there because another is large.

    A tensor whose outputs would not have less noise, as `output_noise` estimates it, keeps its scale.

    Raises:
        ConfigError: alpha is not between 0 and 1.
        CalibrationError: There is no data.
        NonFiniteError: NaN or Inf in a tensor.
    """
    if not 0 <= config.alpha <= 1:
        raise ConfigError(f"SmoothQuantConfig.alpha={config.alpha}: possible: 0 (weights stay) to 1 (all moves).")
    groups = _groups(model, place(model, settings))
    if not groups:
        return 0
    statistics = {group.value.name or "": _ChannelStatistics() for group in groups}
    collect(Prepared(model, required(data, config)), statistics, settings)
    done = [group for group in groups if _smooth(group, statistics[group.value.name or ""], config.alpha)]
    multiplied = sum(group.constants is None for group in done)
    logger.info("SmoothQuant: %d of %d tensors gain; %d by a Mul.", len(done), len(groups), multiplied)
    return len(groups)


def _linear_readers(graph: ir.Graph) -> dict[ir.Value, list[ir.Node]]:
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        if is_linear(node) and node.inputs[0] is not None:
            readers.setdefault(node.inputs[0], []).append(node)
    return readers


def _groups(model: ir.Model, placement: Placement) -> list[Group]:
    """The tensors that at least one linear layer reads quantized, under a scale that their channels share."""
    groups = []
    for value, layers in _linear_readers(model.graph).items():
        weights = tuple(placement.weights.get((layer, 1)) for layer in layers)
        dynamic = any(layer in placement.dynamic for layer in layers)
        input_spec = DYNAMIC if dynamic else placement.activations.get(value)
        if input_spec is None or input_spec.is_cast or not any(weights):
            continue
        alone = not value.is_graph_output() and {use.node for use in value.uses()} == set(layers)
        constants = _Search(placement, weight_by_input(layers[0]).size).after(value) if alone else None
        if constants is not None or not _is_quantized_before(value, placement):
            groups.append(Group(value, tuple(layers), constants, input_spec, weights))
    return groups


def _is_quantized_before(value: ir.Value, placement: Placement) -> bool:
    """Return True where a tensor only holds values that were rounded already: a Mul comes too late for them."""
    producer = value.producer()
    moves = producer is not None and rule_of(producer.op_type).moves(producer)
    return moves and producer is not None and producer.inputs[0] in placement.activations


@dataclass(frozen=True)
class _Search:
    """Looks for constants that divide a value by s, of so many channels, where they are divided by it."""

    placement: Placement
    channels: int

    def after(self, value: ir.Value) -> tuple[ChannelConstant, ...] | None:
        """The constants, where there are any; whoever asks knows that nothing else reads the value."""
        node = value.producer()
        if node is None or value is not node.outputs[0]:
            return None
        if is_linear(node):
            return self._fitting(output_constants(node))
        norm = fused_norm(node)
        if norm is not None:
            return self._fitting(tuple(part for part in (norm.gain, norm.bias) if part is not None))
        if is_op(node, *_COMMUTES, "Div") or (is_op(node, "Reshape") and self._keeps_channels(node)):
            return self._through(node, 0)
        if is_op(node, "Mul"):
            # A constant factor takes it, or one of the two.
            first = int(is_constant(node.inputs[1]))
            return self._through(node, first) or self._through(node, 1 - first)
        if is_op(node, "Add", "Sub"):
            one, other = self._through(node, 0), self._through(node, 1)
            return one + other if one and other else None
        return None

    def _keeps_channels(self, node: ir.Node) -> bool:
        """Return True where the last axis of what a node reads and writes are the channels."""
        shapes = [dims(value) for value in (node.inputs[0], node.outputs[0])]
        return all(shape and shape[-1] == self.channels for shape in shapes)

    def _through(self, node: ir.Node, index: int) -> tuple[ChannelConstant, ...] | None:
        """The constants after one input of a node, or that input where it is constant."""
        value = node.inputs[index]
        if value is None:
            return None
        if is_constant(value):
            return self._fitting((ChannelConstant(node, index),))
        return self.after(value) if read_once(value) else None

    def _fitting(self, constants: tuple[ChannelConstant, ...]) -> tuple[ChannelConstant, ...] | None:
        """The places, if each is a constant with these channels, or one value for all that stays in float."""
        return constants if constants and all(self._fits(part) for part in constants) else None

    def _fits(self, part: ChannelConstant) -> bool:
        if not is_constant(part.node.inputs[part.index]):
            return False
        single = part.size == 1 and (part.node, part.index) not in self.placement.weights
        return single or part.size == self.channels


def _smooth(group: Group, statistics: _ChannelStatistics, alpha: float) -> bool:
    """Scale one tensor if that is worth it."""
    if not statistics.count:
        return False
    if not np.isfinite(statistics.power).all():
        raise NonFiniteError(f"{group.value.name} holds NaN or Inf.")
    largest = np.maximum(np.abs(statistics.low), np.abs(statistics.high)).astype(np.float64)
    ranges = [channel_range(weight.array, weight.axis) for weight in map(weight_by_input, group.layers)]
    s = smoothing_scale(largest, np.max(ranges, axis=0), alpha)
    without, noise = (_noise(group, statistics, scale) for scale in (np.ones_like(s), s))
    if without is not None and noise is not None and noise > WORTH * without:
        return False
    for layer in group.layers:
        weight_by_input(layer).multiply(s)
    for factor in group.constants or ():
        factor.multiply(1 / s)
    if group.constants is None:
        _insert_mul(group, 1 / s)
    return True


def _noise(group: Group, statistics: _ChannelStatistics, s: NumpyArray) -> float | None:
    """The noise of the outputs under a scale; None where the input has no one step."""
    if not group.input.has_zero_point:
        return None
    low, high = np.float32((statistics.low / s).min()), np.float32((statistics.high / s).max())
    step = float(qparams_from_range(low, high, group.input).scale)
    weight_power, error_power = np.zeros_like(s), np.zeros_like(s)
    for layer, weight_spec in zip(group.layers, group.weights, strict=True):
        rows, outputs = weight_by_input(layer), output_axis(layer)
        weight = (rows.array * rows.along(s)).astype(np.float32)
        weight_power += (weight.astype(np.float64) ** 2).sum(outputs)
        if weight_spec is not None and not weight_spec.is_block:
            error = fake_quantize(weight, compute_qparams(weight, weight_spec), weight_spec) - weight
            error_power += (error.astype(np.float64) ** 2).sum(outputs)
    return output_noise(step, weight_power, error_power, statistics.power / s**2)


def _insert_mul(group: Group, factor: NumpyArray) -> None:
    """Let the layers read value * factor."""
    value, graph = group.value, group.layers[0].graph
    assert graph is not None
    dtype = weight_by_input(group.layers[0]).array.dtype
    smoothing = add_constant(graph, f"{value.name}_smoothing", factor.astype(dtype))
    product = ir.node("Mul", [value, smoothing], name=f"{value.name}_Smoothing")
    output = product.outputs[0]
    output.name, output.type, output.shape = f"{value.name}_smoothed", value.type, value.shape
    product.meta[FACTOR] = True
    graph.insert_before(group.layers[0], [product])
    for layer in group.layers:
        layer.replace_input_with(0, output)
