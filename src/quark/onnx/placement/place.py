"""place: which tensors carry Q/DQ, with which spec, before any data is seen.

A tensor is quantized where a quantized node reads or writes it. Tensors that must have one scale (data movement,
aligned Concat and the like) form a class with one range. A node and the Relu or Clip that alone reads it have no
scale between them, as runtimes fuse the two.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from quark.base.log import logger
from quark.core.granularity import PerTensor
from quark.core.spec import LayerSpec
from quark.errors import NothingToQuantizeError
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import is_read
from quark.onnx.graph.masks import added_masks, is_mask, masked_values
from quark.onnx.graph.model_file import live_inputs
from quark.onnx.operators import rule_of
from quark.onnx.operators.targets import TARGETS, Target
from quark.onnx.passes.fuse_gelu import gelus
from quark.onnx.placement.block_formats import refine_block_axes, refuse_too_many
from quark.onnx.placement.constants import has_weight, place_added_bias, place_constants
from quark.onnx.placement.dual_pairs import insert_identities, widen_sources
from quark.onnx.placement.kept_codes import decoded, has_codes
from quark.onnx.placement.kernels import fits_dynamic, gains, is_depthwise, nodes_before_log
from quark.onnx.placement.placement import Placement
from quark.onnx.placement.select_nodes import select_nodes
from quark.onnx.placement.shared_scales import free_relu_zero, remove_fused, share_scales
from quark.onnx.placement.stored_weights import fits_lstm_kernel, stored_specs
from quark.onnx.placement.weight_spec import weight_spec


def place(model: ir.Model, settings: Settings) -> Placement:
    """Decide what is quantized; with dual pairs, an Identity stands between the two until they are written.

    Raises:
        ConfigError: A name or pattern matches nothing.
        NothingToQuantizeError: Nothing is left to quantize.
        NotSupportedError: Functions of block formats would make a graph that is too large.
    """
    placement = Placement(half=settings.qdq.quantize_fp16)
    selected = select_nodes(model, settings)
    if TARGETS[settings.qdq.target].float_islands:
        # Inside a GELU stand a cube and a saturated function: 8 bits lose there what no runtime gains by them.
        inside = {node for _, _, matched in gelus(model.graph) for node in matched.nodes}
        selected = {node: layer for node, layer in selected.items() if node not in inside}
    logged = nodes_before_log(model.graph)
    for node, layer in selected.items():
        _place_node(node, layer, settings, placement, node in logged)
    if not (placement.activations or placement.weights or placement.biases):
        # Nor is a node of integers, where all op types are asked for.
        raise _nothing_to_quantize(model, selected, placement, settings)
    if not settings.specs.weights_only:
        _arrange_scales(placement, settings)
    blocks = any(spec.is_block for spec in placement.activations.values())
    # Calibration finds masks by their range; NaN, with which outputs are filled, has none. Blocks see no data.
    if blocks:
        masks = masked_values(model.graph) | added_masks(model.graph, lambda value: None)
    else:
        masks = {v for v in placement.activations if is_mask(v)}
    placement.leave_in_float(masks)
    refine_block_axes(placement, settings.specs.refine_block_axis)
    refuse_too_many(model, placement)
    return placement


def _place_node(node: ir.Node, layer: LayerSpec, settings: Settings, placement: Placement, before_log: bool) -> None:
    """Quantize one selected node, unless it computes in floats all the same."""
    target = TARGETS[settings.qdq.target]
    # What a target gains is said of static activations.
    if placement.computes_other_float(node) or not (settings.specs.weights_apart or gains(node, target, placement)):
        return
    if stored := stored_specs(node, layer, settings, placement):
        placement.nodes.append(node)
        placement.weights.update({(node, index): spec for index, spec in stored.items()})
        if layer.input is not None and fits_lstm_kernel(node, next(iter(stored.values()))):
            placement.dynamic.append(node)
    elif layer.dynamic_input:
        _place_dynamic(node, layer, settings, placement, before_log)
    elif not settings.specs.weights_only:
        _place_static(node, layer, settings, placement)
    elif has_weight(node, layer, settings):
        placement.nodes.append(node)
        place_constants(node, layer, settings, placement)


def _place_static(node: ir.Node, layer: LayerSpec, settings: Settings, placement: Placement) -> None:
    """Quantize what a node reads and writes, and its constants."""
    target, rule, read = TARGETS[settings.qdq.target], rule_of(node.op_type), live_inputs(node)
    live = [index for index in rule.inputs(node) if node.inputs[index] in read]
    follows = rule.moves(node) and not settings.qdq.force_pass_through
    if follows and (not live or node.inputs[live[0]] not in placement.activations):
        return
    if settings.specs.matmul_const_only and node.op_type == "MatMul" and len(live) == 2:
        return
    placement.nodes.append(node)
    if layer.input != settings.specs.layer.input or layer.output != settings.specs.layer.output:
        placement.specific.add(node)
    _place_inputs(node, layer, live, placement, settings.qdq.dual_pairs)
    if not writes_float(node, target, settings):
        _place_outputs(node, layer, placement)
    place_constants(node, layer, settings, placement)
    if target.bias_after_matmul:
        place_added_bias(node, placement)


def _place_dynamic(node: ir.Node, layer: LayerSpec, settings: Settings, placement: Placement, before_log: bool) -> None:
    """Quantize a node with an integer kernel and a constant weight; everything else stays in float.

    Before a logarithm, and of a depthwise convolution, the weight alone is stored as codes.
    """
    weight_alone = node.op_type in TARGETS[settings.qdq.target].stores
    if not weight_alone and node.name not in settings.specs.nodes and fits_dynamic(node):
        weight_alone = before_log or is_depthwise(node)
        if before_log:
            logger.info("A logarithm takes the output of %s: its weight alone is stored as integers.", node.name)
    if weight_alone:
        if has_weight(node, layer, settings):
            assert layer.weight is not None
            placement.nodes.append(node)
            placement.weights[node, 1] = weight_spec(node, layer.weight, settings)
        return
    if not fits_dynamic(node) or layer.weight is None:
        return
    placement.nodes.append(node)
    placement.dynamic.append(node)
    spec = weight_spec(node, layer.weight, settings)
    # ConvInteger has one zero point for all channels of a weight.
    one_scale = node.op_type == "Conv" and not spec.symmetric
    placement.weights[node, 1] = replace(spec, granularity=PerTensor()) if one_scale else spec


def writes_float(node: ir.Node, target: Target, settings: Settings) -> bool:
    """Return True where the output of a quantized node stays in float."""
    return (
        node.op_type in (*target.float_output, *settings.qdq.float_output_types)
        or node.name in settings.qdq.float_outputs
    )


def _place_inputs(node: ir.Node, layer: LayerSpec, live: list[int], placement: Placement, dual: bool) -> None:
    """Give the live inputs of a node its input spec, where they have none yet; a node of its own specs overrules."""
    if layer.input is None:
        return
    known_op = rule_of(node.op_type).constants
    for index in live:
        value = node.inputs[index]
        if value is None or not placement.is_float(value, if_unknown=known_op):
            continue
        if has_codes(value):
            node.replace_input_with(index, decoded(value))
            continue
        placement.reads[node, index] = layer.input
        if value not in placement.activations or (node in placement.specific and not dual):
            placement.activations[value] = layer.input


def _place_outputs(node: ir.Node, layer: LayerSpec, placement: Placement) -> None:
    """Give what a node writes, and anything reads, its output spec."""
    spec = layer.output or layer.input
    if spec is None:
        return
    known_op = rule_of(node.op_type).constants
    for value in node.outputs:
        if placement.is_float(value, if_unknown=known_op) and is_read(value) and not has_codes(value):
            placement.activations[value] = spec


def _arrange_scales(placement: Placement, settings: Settings) -> None:
    """Decide which of the activations share a scale, and what stands where two types meet."""
    remove_fused(placement, settings)
    if settings.qdq.dual_pairs:
        widen_sources(placement)
    share_scales(placement, settings)
    if settings.qdq.dual_pairs:
        insert_identities(placement)
    if settings.specs.unsigned_relu:
        free_relu_zero(placement)


def _nothing_to_quantize(
    model: ir.Model, selected: dict[ir.Node, LayerSpec], placement: Placement, settings: Settings
) -> NothingToQuantizeError:
    present = ", ".join(sorted({node.op_type for node in model.graph}))
    if any(placement.computes_other_float(node) for node in selected):
        present += f"; these are not in {'float16' if placement.half else 'float32'}"
    names = ", ".join(settings.specs.nodes or settings.specs.op_types) or "op types with a rule"
    if settings.specs.layer.weight is None and settings.specs.by_type:
        # Where an algorithm alone asks for quantization, of the op types that it knows.
        chosen = [op_type for op_types, layer in settings.specs.by_type if layer is not None for op_type in op_types]
        names = f"{', '.join(chosen)} ({', '.join(type(algorithm).__name__ for algorithm in settings.algorithms)})"
    names += " with a constant weight" if settings.specs.weights_apart else ""
    return NothingToQuantizeError(f"Nothing to quantize: the model has {present}; asked for: {names}.")
