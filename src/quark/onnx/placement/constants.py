"""Which constants of a quantized node are quantized: its weight, its bias, and operands beside activations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.core.granularity import PerGroup, PerTensor
from quark.core.spec import LayerSpec, ScaleType, TensorSpec
from quark.onnx.config.settings import Settings
from quark.onnx.graph.channels import matmul_bias
from quark.onnx.graph.masks import is_mask
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.operators import rule_of
from quark.onnx.placement.kernels import fits_nbits
from quark.onnx.placement.placement import FACTOR, Placement
from quark.onnx.placement.weight_spec import weight_spec

_WIDEST_DIVISOR = 16
"""Largest over smallest magnitude of a constant divisor that is quantized: beyond, the smallest keeps few bits."""


def has_weight(node: ir.Node, layer: LayerSpec, settings: Settings) -> bool:
    """Return True where a node has a constant weight that is quantized; for MatMulNBits, one that it can hold."""
    index = rule_of(node.op_type).weight
    if index is None or index >= len(node.inputs) or not is_constant(node.inputs[index]) or layer.weight is None:
        return False
    if not constant(node.inputs[index]).size:
        return False  # no scale is its own
    return settings.qdq.matmul_nbits is None or fits_nbits(node, weight_spec(node, layer.weight, settings))


def place_constants(node: ir.Node, layer: LayerSpec, settings: Settings, placement: Placement) -> None:
    """Give the constants of a quantized node their specs."""
    rule = rule_of(node.op_type)
    if FACTOR in node.meta or not rule.constants:
        return
    weight = () if rule.weight is None else (rule.weight,)
    for index in {*rule.inputs(node), *weight}:
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None or not is_constant(value) or not placement.is_float(value) or not constant(value).size:
            continue
        if index != rule.weight:
            spec = _operand_spec(node, value, layer, settings)
        else:
            spec = layer.weight and weight_spec(node, layer.weight, settings)
        if spec is not None:
            placement.weights[node, index] = spec
    _place_bias(node, layer, settings, placement)


def _operand_spec(node: ir.Node, value: ir.Value, layer: LayerSpec, settings: Settings) -> TensorSpec | None:
    """The spec of a constant operand of an elementwise node, which is quantized like an activation; None for float.

    Its own values are all there are, so none is an outlier. The power of two next to their scale is no range for them:
    it clips up to 29 % off the largest, which of a single number is the whole of it.
    """
    spec = layer.input
    if spec is None or settings.specs.weights_only or not _one_scale(node, value):
        return None
    return replace(spec, observer="pof2_min_mse" if spec.scale_type is ScaleType.pof2 else "min_max")


def place_added_bias(node: ir.Node, placement: Placement) -> None:
    """Make the constant that alone is added to a MatMul its int32 bias."""
    operand = matmul_bias(node)
    if operand is not None and (node, 1) in placement.weights and node.inputs[0] in placement.activations:
        placement.added_biases[operand] = node


def _one_scale(node: ir.Node, value: ir.Value) -> bool:
    """Return True where one scale serves a constant: not a mask, not a divisor whose smallest value would become 0."""
    if is_mask(value):
        return False
    if node.op_type != "Div" or not constant(value).size:
        return True
    magnitudes = np.abs(constant(value))
    return not magnitudes.max() > _WIDEST_DIVISOR * magnitudes.min()


def _place_bias(node: ir.Node, layer: LayerSpec, settings: Settings, placement: Placement) -> None:
    """A bias of the layer's own spec, else an int32 one beside integer inputs and weights."""
    rule = rule_of(node.op_type)
    if rule.bias is None or rule.weight is None or rule.bias >= len(node.inputs) or settings.specs.weights_only:
        return
    if not is_constant(node.inputs[rule.bias]):
        return
    weight, bias = placement.weights.get((node, rule.weight)), layer.bias
    if (
        settings.specs.int32_bias
        and bias is None
        and weight is not None
        and layer.input is not None
        and _in_integers(weight, layer.input)
    ):
        if max(weight.dtype.bits, layer.input.dtype.bits) < 32:
            placement.biases[node, rule.bias] = rule.weight
            return
        # The product of two 32-bit scales is too small for a bias to fit.
        bias = weight
    if bias is not None:
        placement.weights[node, rule.bias] = bias if bias.is_block else replace(bias, granularity=PerTensor())


def _in_integers(weight: TensorSpec, data: TensorSpec) -> bool:
    """Return True where a bias can have the scale of the product: one scale for each output at most."""
    return weight.has_zero_point and not isinstance(weight.granularity, PerGroup) and data.has_zero_point
