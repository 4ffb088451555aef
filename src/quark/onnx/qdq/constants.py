"""ConstantStore: weights and biases as they are stored, codes, scales and zero points.

Codes are computed when the file is written: memory holds one weight at a time, and until then an algorithm may change
the float values and the qparams that they come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.core.dtypes import DTYPES, Dtype
from quark.core.granularity import PerChannel, PerTensor
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.onnx.calibration.qparams import balanced, channel_bias, encode, largest_bias
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import constant
from quark.onnx.operators import FUSED_LAYERS, RECURRENT
from quark.onnx.operators.targets import TARGETS
from quark.onnx.placement.placement import Operand
from quark.onnx.qdq.qdq_nodes import QdqNodes, onnx_type, stored_qparams
from quark.onnx_ops.element_types import code_type
from quark.onnx_ops.graph_writer import GraphWriter


class ConstantStore:
    """Writes the constants of one model.

    Args:
        writer: Of its graph.
        settings: What is written.
        qparams: Of each weight, read when its codes are computed.
    """

    def __init__(self, writer: GraphWriter, settings: Settings, qparams: Mapping[Operand, QParams]) -> None:
        self.writer, self.settings, self.qparams = writer, settings, qparams
        self._contents: dict[str, tuple[object, ...]] = {}

    def name(self, operand: Operand, spec: TensorSpec, transpose: bool = False) -> str:
        """A name for the codes of a constant: shared by all nodes that read it in one way, under the same qparams."""
        source, params = _source(operand), self.qparams[operand]
        zero = b"" if params.zero_point is None else np.asarray(params.zero_point).tobytes()
        content = (id(source), spec, np.asarray(params.scale).tobytes(), zero, transpose)
        name = source.name or ""
        return name if self._contents.setdefault(name, content) == content else f"{name}_{operand[0].name}"

    def encoded(self, operand: Operand, spec: TensorSpec, transpose: bool = False) -> tuple[ir.Value, ...]:
        """Codes, scale and zero point of a constant, as initializers.

        Args:
            operand: Which.
            spec: Of the constant.
            transpose: Store the codes with their last two axes swapped.
        """
        name, dtype = self.name(operand, spec, transpose), onnx_type(spec)

        def stored() -> tuple[NumpyArray, NumpyArray]:
            return stored_qparams(self.qparams[operand], spec, self.settings)

        scale, zero_point = stored()
        scale_dtype = ir.DataType.from_numpy(scale.dtype)
        return (
            self.codes(operand, spec, transpose),
            self.writer.shared(f"{name}_scale", lambda: stored()[0], scale_dtype, scale.shape),
            self.writer.shared(f"{name}_zero_point", lambda: stored()[1], dtype, zero_point.shape),
        )

    def codes(self, operand: Operand, spec: TensorSpec, transpose: bool = False) -> ir.Value:
        """The codes of a constant alone, as `encoded` gives them."""
        source, dtype = _source(operand), onnx_type(spec)
        shape, balances = constant(source).shape, self._balances(operand, spec)

        def codes() -> NumpyArray:
            array = encode(constant(source), self.qparams[operand], spec, dtype.numpy())
            if balances:
                array = balanced(array, constant(source), self.qparams[operand], spec)
            return array.swapaxes(-1, -2) if transpose else array

        name = f"{self.name(operand, spec, transpose)}_quantized"
        return self.writer.shared(name, codes, dtype, (*shape[:-2], shape[-1], shape[-2]) if transpose else shape)

    def _balances(self, operand: Operand, spec: TensorSpec) -> bool:
        """Return True where errors of a kernel are to cancel, as in a depthwise Conv whose activations have no scales.

        Where they have, the biases are corrected for what the errors add up to, from data.
        """
        specs, (node, index) = self.settings.specs, operand
        shape = constant(_source(operand)).shape
        depthwise = node.op_type == "Conv" and index == 1 and shape[1] == 1 and math.prod(shape[2:]) > 1
        return depthwise and specs.weights_apart and specs.refine_weight_scales and not spec.dtype.is_float

    def _folds(self, node: ir.Node, spec: TensorSpec) -> bool:
        """Return True where no activation has Q/DQ, and the runtime decodes weights of a node when it loads the file.

        Layers of com.microsoft run in ONNX Runtime alone, which does.
        """
        per_axis = isinstance(spec.granularity, (PerTensor, PerChannel))
        plain = spec.dtype.name in ("int8", "uint8") and per_axis and not self.settings.qdq.float_weights
        folds = node.op_type in FUSED_LAYERS or TARGETS[self.settings.qdq.target].folds_casts
        return plain and self.settings.specs.weights_apart and folds

    def write_weight(self, operand: Operand, spec: TensorSpec) -> None:
        """Put codes and what decodes them between a constant and the node that reads it."""
        node, index = operand
        source = _source(operand)
        nodes = QdqNodes(self.writer, self.settings, source.name or "", reader=node)
        if spec.is_block:
            decoded = nodes.fake_quantize(source, spec)
        elif spec.is_cast and is_op(node, *RECURRENT):
            decoded = nodes.cast_back(self.codes(operand, spec), self.qparams[operand], spec)
        elif self._folds(node, spec):
            codes = self.codes(operand, spec)
            decoded = nodes.decode_once(codes, self.qparams[operand], getattr(spec.granularity, "axis", None))
        else:
            codes, scale, zero = self.encoded(operand, spec)
            axis = getattr(spec.granularity, "axis", None)
            if nodes.is_cast_pair(spec):
                decoded = nodes.cast_back(codes, self.qparams[operand], spec)
            else:
                if self.settings.qdq.float_weights:
                    codes = nodes.linear("QuantizeLinear", [source, scale, zero], spec, axis)
                decoded = nodes.linear("DequantizeLinear", [codes, scale, zero], spec, axis)
        self.writer.insert_before(node)
        node.replace_input_with(index, decoded)

    def write_bias(self, operand: Operand, weight: Operand, weight_spec: TensorSpec, data: QParams) -> None:
        """Make a constant an int32 or int16 bias: scale = input scale * weight scale.

        Args:
            operand: The constant.
            weight: The weight of the node that it is a bias of.
            weight_spec: Its spec.
            data: Scale of what that node reads.
        """
        node, index = operand
        source, data_scale = _source(operand), np.asarray(data.scale, np.float64)
        dtype = bias_type(self.settings)

        def bias_and_scale() -> tuple[NumpyArray, NumpyArray]:
            return bias_scale(constant(source), self.qparams[weight].scale, data_scale, dtype)

        bias, scale = bias_and_scale()
        name, kind = f"{node.name}_{source.name}_quantized", ir.DataType[code_type(dtype)]
        inputs = [
            self.writer.shared(name, lambda: bias_codes(*bias_and_scale(), dtype), kind, bias.shape),
            self.writer.shared(f"{name}_scale", lambda: bias_and_scale()[1], ir.DataType.FLOAT, scale.shape),
            self.writer.shared(f"{name}_zero_point", np.zeros(scale.shape, dtype.name)),
        ]
        nodes = QdqNodes(self.writer, self.settings, source.name or "", reader=node)
        axis = bias.ndim - 1 if scale.ndim else None
        decoded = nodes.standard("DequantizeLinear", inputs, replace(weight_spec, dtype=dtype), axis)
        self.writer.insert_before(node)
        node.replace_input_with(index, decoded)


def bias_type(settings: Settings) -> Dtype:
    """The type of the codes of a bias whose scale follows from others."""
    return DTYPES["int16" if settings.qdq.int16_bias else "int32"]


def bias_scale(
    bias: NumpyArray, weight_scale: NumpyArray, data_scale: NumpyArray, dtype: Dtype
) -> tuple[NumpyArray, NumpyArray]:
    """A bias (..., channels) and its scale, float32: that of the accumulator.

    Args:
        bias: The float values, (channels,); repeated where they are one for all channels.
        weight_scale: (channels,) or ().
        data_scale: Of what the node reads, ().
        dtype: Of the codes. With int16 the finest scale at which they fit, where that of the accumulator is finer.
    """
    bias, scale = channel_bias(bias, weight_scale)
    scale = np.asarray(np.asarray(data_scale, np.float64) * scale, np.float32)
    if dtype.name == "int16":
        scale = np.asarray(np.maximum(scale, largest_bias(bias, scale) / dtype.max), np.float32)
    return bias, scale


def bias_codes(bias: NumpyArray, scale: NumpyArray, dtype: Dtype) -> NumpyArray:
    """The codes of a bias under its scale."""
    rounded = np.rint(bias.astype(np.float64) / scale)
    return np.asarray(np.clip(rounded, dtype.min, dtype.max), dtype.name)


def _source(operand: Operand) -> ir.Value:
    """The float constant."""
    node, index = operand
    value = node.inputs[index]
    assert value is not None
    return value
