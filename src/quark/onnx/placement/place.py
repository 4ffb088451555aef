"""Placement: which tensors carry Q/DQ, with which spec, before any data is seen.

A tensor is quantized where a quantized node reads or writes it. Tensors that must have one scale (data movement,
aligned Concat and the like) form a class with one range. A node and the Relu or Clip that alone reads it have no
scale between them, as runtimes fuse the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from quark.core.granularity import Granularity, PerChannel, PerGroup, PerTensor
from quark.core.patterns import require_matches
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import ConfigError, NotSupportedError, did_you_mean
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import added_bias, read_once
from quark.onnx.graph.masks import is_mask, masked_values
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.graph.scopes import nodes_of
from quark.onnx.operators import ALIGN_GROUPS, NEVER, ON_REQUEST, RULES, rule_of
from quark.onnx.operators.targets import TARGETS, Target
from quark.onnx.placement.block_axes import refine_block_axes
from quark.onnx.placement.dual_pairs import split_borders, widen_sources
from quark.onnx.placement.shared_scales import free_relu_zero, join
from quark.onnx.qdq.dynamic_quantize import fits_dynamic
from quark.onnx.qdq.matmul_nbits import fits_nbits

WIDEST_DIVISOR = 16
"""Largest over smallest magnitude of a constant divisor that is quantized: beyond, the smallest keeps few bits."""

DOMAINS = ("", "ai.onnx", "com.microsoft")
"""Domains whose op types the rules mean: those of ONNX, and of what ONNX Runtime's own fusions leave behind."""

FACTOR = "quark.factor"
"""In `meta` of a Mul: its float factor is part of the node before it, whose output it reads before that is rounded."""


@dataclass
class Placement:
    """The decisions for one graph.

    Attributes:
        activations: Tensor -> spec.
        shared: Tensor -> the tensor whose scale it uses; absent for a class of its own.
        weights: (node, input index) -> spec.
        biases: (node, input index) -> index of the weight.
        added_biases: (Add, input index) of a constant that is the bias of a MatMul -> the MatMul.
        own: Nodes whose activations have specs of their own, not the global ones: these win over their neighbours'.
        reads: (node, input index) -> the spec that the node asks for, whatever the tensor gets.
        half: Whether the floats of the model are float16.
        dynamic: Nodes whose input is quantized as it comes.
        nodes: The quantized nodes.
    """

    activations: dict[ir.Value, TensorSpec] = field(default_factory=dict)
    shared: dict[ir.Value, ir.Value] = field(default_factory=dict)
    weights: dict[tuple[ir.Node, int], TensorSpec] = field(default_factory=dict)
    biases: dict[tuple[ir.Node, int], int] = field(default_factory=dict)
    added_biases: dict[tuple[ir.Node, int], ir.Node] = field(default_factory=dict)
    own: set[ir.Node] = field(default_factory=set)
    reads: dict[tuple[ir.Node, int], TensorSpec] = field(default_factory=dict)
    half: bool = False
    dynamic: list[ir.Node] = field(default_factory=list)
    nodes: list[ir.Node] = field(default_factory=list)

    def root(self, value: ir.Value) -> ir.Value:
        """The tensor that stands for the class of `value`."""
        while value in self.shared:
            value = self.shared[value]
        return value

    def join(self, one: ir.Value, other: ir.Value) -> None:
        """Give two tensors one scale; the class is represented by the first."""
        one, other = self.root(one), self.root(other)
        if one is not other:
            self.shared[other] = one


def place(model: ir.Model, settings: Settings) -> Placement:
    """Decide what is quantized; with dual pairs, an Identity stands between the two until they are written.

    Raises:
        ConfigError: A name or pattern matches nothing, or nothing is left to quantize.
    """
    placement = Placement(half=settings.quantize_fp16)
    target = TARGETS[settings.target]
    chosen = select_nodes(model, settings)
    for node, layer in chosen.items():
        if _is_other_float(node, placement) or not _worth_quantizing(node, target, placement):
            continue
        rule = rule_of(node.op_type)
        if layer.input is not None and layer.input.dynamic and not layer.input.is_block:
            _place_dynamic(node, layer, settings, placement)
            continue
        data = rule.inputs(node)
        live = [i for i in data if node.inputs[i] is not None and not is_constant(node.inputs[i])]
        follows = rule.shares_scale and not settings.force_pass_through
        if follows and (not live or node.inputs[live[0]] not in placement.activations):
            continue
        if settings.matmul_const_only and node.op_type == "MatMul" and len(live) == 2:
            continue
        if settings.weights_only and not _has_weight(node, layer, settings):
            continue
        placement.nodes.append(node)
        if not settings.weights_only:
            if layer.input != settings.layer.input or layer.output != settings.layer.output:
                placement.own.add(node)
            _place_activations(node, layer, live, placement, _writes_float(node, target, settings), settings.dual_pairs)
        _place_constants(node, layer, settings, placement)
        if target.bias_after_matmul:
            _place_added_bias(node, placement)
    if not placement.nodes:
        present = ", ".join(sorted({node.op_type for node in model.graph}))
        wrong = any(_is_other_float(node, placement) for node in chosen)
        other = f"; these are not in {'float16' if placement.half else 'float32'}" if wrong else ""
        raise ConfigError(f"Nothing to quantize: the model has {present}{other}; asked for: {_asked(settings)}.")
    if not settings.weights_only:
        _fuse(placement, settings)
        if settings.dual_pairs:
            widen_sources(placement)
        _share_scales(placement, settings)
        if settings.dual_pairs:
            split_borders(placement)
        if settings.unsigned_relu:
            free_relu_zero(placement)
    if any(spec.is_block for spec in placement.activations.values()):
        for value in masked_values(model.graph):
            placement.activations.pop(value, None)
    refine_block_axes(placement, settings.refine_block_axis)
    return placement


def _asked(settings: Settings) -> str:
    names = ", ".join(settings.nodes or settings.op_types) or "op types with a rule"
    if settings.layer.weight is None and settings.by_type:
        # Where an algorithm alone asks for quantization, of the op types that it knows.
        chosen = [op_type for op_types, layer in settings.by_type if layer is not None for op_type in op_types]
        names = f"{', '.join(chosen)} ({', '.join(type(algorithm).__name__ for algorithm in settings.algorithms)})"
    return names + (" with a constant weight" if settings.weights_only else "")


def _has_weight(node: ir.Node, layer: LayerSpec, settings: Settings) -> bool:
    """Whether a node has a constant weight; one that a MatMulNBits can hold, where these are asked for."""
    weight = rule_of(node.op_type).weight
    if weight is None or weight >= len(node.inputs) or not is_constant(node.inputs[weight]) or layer.weight is None:
        return False
    return settings.matmul_nbits is None or fits_nbits(node, weight_spec(node, layer.weight, settings))


def _place_dynamic(node: ir.Node, layer: LayerSpec, settings: Settings, placement: Placement) -> None:
    """A node with an integer kernel and a constant weight; everything else stays in float."""
    if not fits_dynamic(node) or layer.weight is None:
        return
    placement.nodes.append(node)
    placement.dynamic.append(node)
    spec = weight_spec(node, layer.weight, settings)
    # ConvInteger has one zero point for all channels of a weight.
    one = node.op_type == "Conv" and not spec.symmetric
    placement.weights[node, 1] = replace(spec, granularity=PerTensor()) if one else spec


def select_nodes(model: ir.Model, settings: Settings) -> dict[ir.Node, LayerSpec]:
    """The nodes that are quantized, each with its specs: exclude > by name > by type > global."""
    nodes = {node.name or "": node for node in model.graph}
    types = _op_types(model, settings)
    require_matches(settings.nodes, nodes, "NodesToQuantize")
    require_matches(settings.float_outputs, nodes, "NodesToExcludeOutputQuantization")
    excluded = nodes_of(settings.exclude, model, "exclude")
    named = [(nodes_of(scopes, model, "specific_layer_config"), layer) for scopes, layer in settings.by_name]
    chosen: dict[ir.Node, LayerSpec] = {}
    for name, node in nodes.items():
        if FACTOR in node.meta:
            producer = node.inputs[0].producer() if node.inputs[0] is not None else None
            chosen.update({node: chosen[producer]} if producer in chosen else {})
            continue
        if (
            node.op_type not in types
            or node.domain not in DOMAINS
            or node in excluded
            or (settings.nodes and name not in settings.nodes)
        ):
            continue
        layer: LayerSpec | None = settings.layer
        for op_types, by_type in settings.by_type:
            if node.op_type in op_types:
                layer = by_type
        for members, by_name in reversed(named):
            if node in members:
                layer = by_name
        if layer is not None:
            chosen[node] = layer
    return chosen


def _op_types(model: ir.Model, settings: Settings) -> set[str]:
    """The op types to quantize. Raises ConfigError for one that never is, or that nobody has."""
    present = {node.op_type for node in model.graph if node.domain in DOMAINS}
    asked = {*settings.op_types, *settings.extra_op_types}
    named = {name for names, _ in settings.by_type for name in names}
    if asked & NEVER:
        raise ConfigError(f"{', '.join(sorted(asked & NEVER))} cannot be quantized; they stay in float.")
    known = {*RULES, *ON_REQUEST, *present}
    for name in sorted((asked | named) - known - NEVER):
        raise ConfigError(f"There is no op type {name!r} in the model, nor a rule for it. {did_you_mean(name, known)}")
    return present - NEVER if settings.all_op_types else {*(settings.op_types or RULES), *settings.extra_op_types}


def _worth_quantizing(node: ir.Node, target: Target, placement: Placement) -> bool:
    """Whether the target's runtime gains by quantizing this node, given the nodes before it."""
    if target.fuses is not None and node.op_type not in target.fuses:
        return False
    if placement.half and node.op_type == "Concat":
        # Nor does it read decoded tensors then: qdq/rewriter.py says why.
        return False
    if node.op_type in ("Gemm", "MatMul") and target.float_output and not is_constant(node.inputs[1]):
        return False
    if node.op_type not in target.follows:
        return True
    quantized = set(placement.nodes)
    producers = [v.producer() for v in node.inputs if v is not None and not is_constant(v)]
    return (
        bool(producers)
        and all(p in quantized and p.op_type not in target.float_output for p in producers if p)
        and (None not in producers)
    )


def _place_added_bias(node: ir.Node, placement: Placement) -> None:
    """Make the constant that alone is added to a MatMul its int32 bias."""
    place = added_bias(node)
    if place is not None and (node, 1) in placement.weights and node.inputs[0] in placement.activations:
        placement.added_biases[place] = node


def _writes_float(node: ir.Node, target: Target, settings: Settings) -> bool:
    """Whether the output of a quantized node stays in float."""
    return node.op_type in (*target.float_output, *settings.float_output_types) or node.name in settings.float_outputs


def _place_activations(
    node: ir.Node, layer: LayerSpec, live: list[int], placement: Placement, writes_float: bool, dual: bool
) -> None:
    guess = rule_of(node.op_type).constants
    if layer.input is not None:
        for index in live:
            value = node.inputs[index]
            assert value is not None
            if not _is_float(value, placement, guess):
                continue
            placement.reads[node, index] = layer.input
            if node in placement.own and not dual:
                placement.activations[value] = layer.input
            placement.activations.setdefault(value, layer.input)
    spec = None if writes_float else layer.output or layer.input
    for value in node.outputs:
        if spec is not None and _is_float(value, placement, guess) and (list(value.uses()) or value.is_graph_output()):
            placement.activations[value] = spec


def _place_constants(node: ir.Node, layer: LayerSpec, settings: Settings, placement: Placement) -> None:
    rule = rule_of(node.op_type)
    if FACTOR in node.meta or not rule.constants:
        return
    for index in {*rule.inputs(node), *((rule.weight,) if rule.weight is not None else ())}:
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None or not is_constant(value) or not _is_float(value, placement):
            continue
        if index == rule.weight and layer.weight is not None:
            placement.weights[node, index] = weight_spec(node, layer.weight, settings)
        elif index != rule.weight and layer.input is not None and not settings.weights_only and _one_scale(node, value):
            # A constant operand of an elementwise node is quantized like an activation.
            placement.weights[node, index] = replace(layer.input, observer="min_max")
    _place_bias(node, layer, settings, placement)


def _one_scale(node: ir.Node, value: ir.Value) -> bool:
    """Whether one scale serves a constant: not a mask, not a divisor whose smallest value would become 0."""
    array = constant(value)
    wide = node.op_type == "Div" and array.size and np.abs(array).max() > WIDEST_DIVISOR * np.abs(array).min()
    return not is_mask(value) and not wide


def _place_bias(node: ir.Node, layer: LayerSpec, settings: Settings, placement: Placement) -> None:
    """An int32 bias beside integer inputs and weights, else one of the layer's own spec."""
    rule = rule_of(node.op_type)
    if rule.bias is None or rule.weight is None or rule.bias >= len(node.inputs) or settings.weights_only:
        return
    if not is_constant(node.inputs[rule.bias]):
        return
    weight = placement.weights.get((node, rule.weight))
    integers = weight is not None and weight.has_zero_point and not isinstance(weight.granularity, PerGroup)
    integers = integers and layer.input is not None and layer.input.has_zero_point
    bias = layer.bias
    if settings.int32_bias and integers and weight is not None and layer.input is not None:
        if max(weight.dtype.bits, layer.input.dtype.bits) < 32:
            placement.biases[node, rule.bias] = rule.weight
            return
        # The product of two 32-bit scales is too small for a bias to fit.
        bias = weight
    if bias is not None:
        placement.weights[node, rule.bias] = bias if bias.is_block else replace(bias, granularity=PerTensor())


def weight_spec(node: ir.Node, spec: TensorSpec, settings: Settings) -> TensorSpec:
    """The spec of a weight, along the axis that its op has for channels, or for the sum over a group."""
    granularity: Granularity = spec.granularity
    value = node.inputs[rule_of(node.op_type).weight or 0]
    if isinstance(granularity, PerChannel) or (isinstance(granularity, PerGroup) and not spec.is_block):
        shape = constant(value).shape
        axis = rule_of(node.op_type).channel_axis(node) % max(1, len(shape))
        asked = dict(settings.channel_axes).get(node.op_type, axis)
        if asked not in (axis, axis - len(shape)):
            raise NotSupportedError(
                f"QDQOpTypePerChannelSupportToAxis: axis {asked} of the weight {list(shape)} of {node.name}: runtimes "
                f"have integer kernels for scales of output channels only. Possible: {axis}, or leave the op type out."
            )
        if isinstance(granularity, PerGroup) and len(shape) == 2:
            granularity = PerGroup(1 - axis, granularity.size, pad=True)
        else:
            # The integer kernel of MatMul takes one scale for a stack of matrices.
            stacked = node.op_type == "MatMul" and len(shape) > 2 and not settings.weights_only
            granularity = PerChannel(axis) if len(shape) > 1 and not stacked else PerTensor()
    return replace(spec, granularity=granularity)


def _fuse(placement: Placement, settings: Settings) -> None:
    """Remove the scale between a node and the one that is fused into it: its activation, its constant factor."""
    quantized = set(placement.nodes)
    for node in placement.nodes:
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if value is None or producer is None or producer not in quantized:
                continue
            factored = not value.is_graph_output() and all(FACTOR in use.node.meta for use in value.uses())
            if factored or (read_once(value) and (producer.op_type, node.op_type) in settings.fused):
                spec = placement.activations.pop(value, None)
                if spec is not None and producer in placement.own and node.outputs[0] in placement.activations:
                    placement.activations[node.outputs[0]] = spec


def _share_scales(placement: Placement, settings: Settings) -> None:
    aligned = {op_type for name in settings.align for op_type in ALIGN_GROUPS[name]}
    for node in placement.nodes:
        outputs = [v for v in node.outputs if v in placement.activations]
        inputs = [v for v in node.inputs if v is not None and v in placement.activations]
        if rule_of(node.op_type).shares_scale and inputs and inputs[0] is node.inputs[0]:
            for value in outputs:
                join(placement, inputs[0], value, settings.layer if settings.propagate_specs else None)
        elif node.op_type in aligned:
            outputs = outputs or _factored(node, placement)
            for value in [*inputs, *outputs][1:]:
                join(placement, (inputs or outputs)[0], value)


def _factored(node: ir.Node, placement: Placement) -> list[ir.Value]:
    """What a node writes behind its constant factor."""
    products = [use.node for use in node.outputs[0].uses() if FACTOR in use.node.meta]
    return [value for product in products for value in product.outputs if value in placement.activations]


def _is_float(value: ir.Value, placement: Placement, guess: bool = True) -> bool:
    """Whether a value is a tensor of float32; of unknown type: what is guessed, by an op that is known."""
    if value.type is None:
        return guess
    # A sequence of tensors has an element type too.
    kind = ir.DataType.FLOAT16 if placement.half else ir.DataType.FLOAT
    return isinstance(value.type, ir.TensorType) and value.dtype is kind


def _is_other_float(node: ir.Node, placement: Placement) -> bool:
    """Whether a node computes in another float type than the model's, for which there are no scales."""
    named = [value for value in (*node.inputs, *node.outputs) if value is not None]
    values = (value for value in named if not _is_float(value, placement))
    return any(value.dtype is not None and value.dtype.is_floating_point() for value in values)
