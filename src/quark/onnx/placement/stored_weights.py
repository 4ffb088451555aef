"""Weights that are stored as codes beside float activations, though Q/DQ cannot reach what the node computes.

LSTM, GRU, RNN    W (directions, gates * hidden, inputs), R (directions, gates * hidden, hidden)
                  as float16 in dynamic quantization, but for an LSTM in integers: with no kernel to gain, and no data
                  to compare what the states make of an error, half the size is taken where it costs nothing
Gather            a table (rows, columns) of which rows are picked, as an embedding
com.microsoft     the matrix (inputs, 3 * hidden) of an Attention, the tables of an EmbedLayerNormalization
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerBlock, PerChannel, PerGroup, PerTensor
from quark.core.spec import LayerSpec, TensorSpec
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.operators import FUSED_LAYERS, RECURRENT, output_axis, rule_of
from quark.onnx.passes.store_float16 import as_float16
from quark.onnx.placement.kernels import fits_block_kernel
from quark.onnx.placement.placement import Placement

HALF = TensorSpec(DTYPES["float16"])
_SMALLEST_TABLE = 1024
"""Values of a table below which two more nodes weigh as much as what they save."""


def stored_specs(node: ir.Node, layer: LayerSpec, settings: Settings, placement: Placement) -> dict[int, TensorSpec]:
    """Index -> spec of the constants of a node that are stored as codes; none where activations have Q/DQ."""
    spec, indices = layer.weight, _stored_constants(node, layer, settings, placement)
    if spec is None or not indices:
        return {}
    if node.op_type in FUSED_LAYERS:
        large = [index for index in indices if constant(node.inputs[index]).size >= _SMALLEST_TABLE]
        return {index: _fused_spec(node, spec) for index in large}
    if is_op(node, *RECURRENT):
        return _recurrent_specs(node, indices, spec, layer.dynamic_input)
    if layer.input is not None and layer.dynamic_input and isinstance(spec.granularity, PerTensor):
        # What is picked is an activation, whose zero point costs nothing.
        spec = replace(layer.input, dynamic=False)
    return _table(node, spec) if is_op(node, "Gather") else {}


def _stored_constants(node: ir.Node, layer: LayerSpec, settings: Settings, placement: Placement) -> list[int]:
    """Return which inputs are stored as codes beside floats; none where any is computed, or of another type."""
    spec, beside_floats = layer.weight, settings.specs.weights_only or layer.dynamic_input
    if not beside_floats or settings.qdq.matmul_nbits is not None:
        return []
    if spec is None or spec.is_block or not spec.has_zero_point:
        return []
    values = {index: node.inputs[index] for index in rule_of(node.op_type).stored if index < len(node.inputs)}
    present = {index: value for index, value in values.items() if value is not None}
    usable = all(is_constant(value) and placement.is_float(value) for value in present.values())
    return list(present) if usable else []


def _recurrent_specs(node: ir.Node, indices: list[int], spec: TensorSpec, dynamic: bool) -> dict[int, TensorSpec]:
    """Of a recurrent layer: in dynamic quantization without a kernel, float16 where the values allow it."""
    if dynamic and spec.dtype.bits == 8 and not fits_lstm_kernel(node, spec):
        arrays = {index: constant(node.inputs[index]) for index in indices}
        # There is no float16 of what would lose more than its last digits.
        return {index: HALF for index, x in arrays.items() if x.dtype == np.float32 and as_float16(x) is not None}
    in_kernel = dynamic and is_op(node, "LSTM")
    return {index: _recurrent(node, index, spec, in_kernel) for index in indices}


def stored_spec(node: ir.Node, index: int, spec: TensorSpec, in_kernel: bool) -> TensorSpec | None:
    """A spec in the form that the node, or its kernel of integers, has for this constant; None where it has none."""
    if node.op_type in FUSED_LAYERS:
        return _fused_spec(node, spec)
    if is_op(node, *RECURRENT):
        return _recurrent(node, index, spec, in_kernel)
    return _table(node, spec).get(index)


def _fused_spec(node: ir.Node, spec: TensorSpec) -> TensorSpec:
    """The spec of a matrix, its scales those of output channels, or of a table, whose rows have them."""
    axis = output_axis(node)
    if isinstance(spec.granularity, PerGroup):
        return replace(spec, granularity=PerGroup(1 - axis, spec.granularity.size, pad=True))
    return replace(spec, granularity=PerChannel(axis)) if isinstance(spec.granularity, PerChannel) else spec


def fits_lstm_kernel(node: ir.Node, spec: TensorSpec) -> bool:
    """Return True where ONNX Runtime's DynamicQuantizeLSTM computes a node: 8 bits, float32, time before batch."""
    if not is_op(node, "LSTM") or spec.dtype.bits != 8 or constant(node.inputs[1]).dtype != np.float32:
        return False
    return node.attributes.get_int("layout", 0) == 0


def _recurrent(node: ir.Node, index: int, spec: TensorSpec, in_kernel: bool) -> TensorSpec:
    """The spec of W or R.

    Directions are different layers: the kernel takes a scale for each output of each of them. DequantizeLinear takes
    scales along one axis.
    """
    directions, _, columns = constant(node.inputs[index]).shape
    granularity, to_kernel = spec.granularity, in_kernel and fits_lstm_kernel(node, spec)
    if isinstance(granularity, PerGroup):
        granularity = PerGroup(2, granularity.size, pad=True)
    elif isinstance(granularity, PerChannel) and not to_kernel:
        granularity = PerChannel(1)
    elif isinstance(granularity, PerChannel) and spec.symmetric:
        granularity = PerBlock((1, columns))
    elif to_kernel or directions > 1:
        # The kernel has one zero point for all outputs of a direction.
        granularity = PerChannel(0)
    return replace(spec, granularity=granularity)


def _table(node: ir.Node, spec: TensorSpec) -> dict[int, TensorSpec]:
    """The spec of a table that only Gathers read: of 8 bits with a scale for each row or for all, or of 4 in blocks."""
    table = node.inputs[0]
    array = constant(table)
    if array.ndim != 2 or array.size < _SMALLEST_TABLE or node.attributes.get_int("axis", 0) not in (0, -2):
        return {}
    assert table is not None
    if not all(is_op(use.node, "Gather") and use.idx == 0 for use in table.uses()):
        return {}
    if spec.dtype.bits == 4 and isinstance(spec.granularity, PerGroup) and fits_block_kernel(spec.granularity.size):
        return {0: replace(spec, granularity=PerGroup(1, spec.granularity.size, pad=True))}
    if spec.dtype.bits != 8:
        return {}
    return {0: replace(spec, granularity=PerTensor() if isinstance(spec.granularity, PerTensor) else PerChannel(0))}
