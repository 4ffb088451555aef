"""Changes the integer type in which biases are stored.

float = code * scale        code' = round(float / scale')

int32      scale' = scale of the input * scale of the weight, as runtimes add it to the accumulator
int16      scale' = scale, or the smallest power of two times it at which the largest code fits
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.errors import NotSupportedError
from quark.onnx.graph.edit import is_op, remove_unused
from quark.onnx.graph.model_file import constant, opset
from quark.onnx.operators import BIASED
from quark.onnx.passes.convert_opset_version import convert_opset_version
from quark.onnx.qdq.remove_qdq import DEQUANTIZE
from quark.onnx_ops.graph_writer import add_constant

WITH_BIAS = (*BIASED, "LayerNormalization", "InstanceNormalization", "BatchNormalization")
INT16_OPSET = 21
"""The first opset whose DequantizeLinear takes int16."""


def biases_to_int16(model: ir.Model) -> int:
    """Store int32 biases as int16, with a coarser scale where a code does not fit; return how many.

    A model with such a bias is raised to opset 21, before which no runtime takes it.
    """
    found = [(node, decoder) for node, decoder in _decoded_biases(model, WITH_BIAS) if _kind(decoder) == "int32"]
    if not found:
        return 0
    if opset(model) < INT16_OPSET:
        convert_opset_version(model, INT16_OPSET)
        found = [(node, decoder) for node, decoder in _decoded_biases(model, WITH_BIAS) if _kind(decoder) == "int32"]
    done = set()
    for _, decoder in found:
        if decoder in done:
            continue
        done.add(decoder)
        codes, scale = constant(decoder.inputs[0]).astype(np.int64), constant(decoder.inputs[1])
        codes = codes - _zero_point(decoder)
        largest = abs(codes) if scale.size > 1 else np.asarray(abs(codes).max(initial=0)).reshape(scale.shape)
        factor = np.exp2(np.maximum(0, np.ceil(np.log2(np.maximum(1, largest) / 32767))))
        factor = factor.astype(scale.dtype)
        _store(decoder, np.rint(codes / factor).astype(np.int16), scale * factor)
    remove_unused(model)
    return len(done)


def biases_to_int32(model: ir.Model) -> int:
    """Store biases as int32 with the scale of input times weight, as CPUs compute; return how many.

    Raises:
        NotSupportedError: A scale is not constant, an input or weight has a zero point for its bias to follow, or a
            bias that several nodes read needs more than one scale.
    """
    done: dict[ir.Node, NumpyArray] = {}
    for node, decoder in _decoded_biases(model, BIASED):
        wanted = _accumulator_scale(node)
        if wanted is None or _kind(decoder) == "int32":
            continue
        if decoder in done:
            if not np.array_equal(done[decoder], wanted):
                raise NotSupportedError(
                    f"{node.name}: nodes of other scales read its bias too. Possible: first run "
                    "convert_shared_initializer_to_unique."
                )
            continue
        done[decoder] = wanted
        values = (constant(decoder.inputs[0]).astype(np.float64) - _zero_point(decoder)) * constant(decoder.inputs[1])
        codes = np.clip(np.rint(values / wanted), -(2**31), 2**31 - 1)
        _store(decoder, codes.astype(np.int32), wanted.astype(np.float32))
    remove_unused(model)
    return len(done)


def _decoded_biases(model: ir.Model, op_types: tuple[str, ...]) -> list[tuple[ir.Node, ir.Node]]:
    """The nodes whose third input is a stored bias, each with the DequantizeLinear of that bias."""
    pairs = []
    for node in model.graph:
        bias = node.inputs[2] if is_op(node, *op_types) and len(node.inputs) > 2 else None
        decoder = bias.producer() if bias is not None else None
        if decoder is not None and decoder.op_type in DEQUANTIZE and _kind(decoder) and _kind(decoder)[0] in "iu":
            pairs.append((node, decoder))
    return pairs


def _kind(decoder: ir.Node) -> str:
    codes = constant(decoder.inputs[0])
    return "" if codes is None or constant(decoder.inputs[1]) is None else str(codes.dtype)


def _zero_point(decoder: ir.Node) -> NumpyArray:
    zero = constant(decoder.inputs[2]) if len(decoder.inputs) > 2 else None
    return np.asarray(0 if zero is None else zero, np.int64)


def _accumulator_scale(node: ir.Node) -> NumpyArray | None:
    """Scale of the input times that of the weight, float64; None where one of them is not quantized."""
    scales = []
    for value in node.inputs[:2]:
        decoder = value.producer() if value is not None else None
        if decoder is None or decoder.op_type not in DEQUANTIZE:
            return None
        scale = constant(decoder.inputs[1])
        if scale is None:
            raise NotSupportedError(f"{node.name}: the scale {decoder.inputs[1]} is computed, not stored.")
        scales.append(scale.astype(np.float64))
    return np.asarray(scales[0] * scales[1])


def _store(decoder: ir.Node, codes: NumpyArray, scale: NumpyArray) -> None:
    """Let a DequantizeLinear read new codes; the names that it had go to the new constants."""
    graph = decoder.graph
    assert isinstance(graph, ir.Graph)
    arrays = (codes, scale, np.zeros(scale.shape, codes.dtype))
    for index, array in enumerate(arrays[: len(decoder.inputs)]):
        old = decoder.inputs[index]
        assert old is not None
        decoder.replace_input_with(index, add_constant(graph, f"{old.name}_{codes.dtype}", array))
    if scale.size > 1 and "axis" not in decoder.attributes:
        decoder.attributes["axis"] = ir.AttrInt64("axis", 0)
