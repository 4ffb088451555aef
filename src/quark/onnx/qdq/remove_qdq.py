"""Removes quantization from a model: pairs around activations go, stored codes become floats again.

float = (code - zero point) * scale        in float32, as the runtime computes it
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.errors import ConfigError
from quark.onnx.graph.edit import prune, remove_unused
from quark.onnx.graph.model_file import constant
from quark.onnx_ops.graph_writer import add_constant, redirect

QUANTIZE = ("QuantizeLinear", "ExtendedQuantizeLinear", "VitisQuantizeLinear")
DEQUANTIZE = ("DequantizeLinear", "ExtendedDequantizeLinear", "VitisDequantizeLinear")
_BOTH_IN_ONE = ("BFPQuantizeDequantize", "MXQuantizeDequantize", "BFPFixNeuron", "MXFixNeuron")


def remove_qdq(model: ir.Model) -> int:
    """Make a quantized model float; return how many tensors changed. Weights keep the error of their quantization."""
    count = 0
    for node in list(model.graph):
        if node.op_type in DEQUANTIZE:
            count += _decode(model.graph, node)
        elif node.op_type in _BOTH_IN_ONE and node.inputs[0] is not None:
            count += _bypass(node, node.inputs[0])
    remove_unused(model)
    return count


def _pairs(between_ops: str) -> set[tuple[str, ...]]:
    pairs = {tuple(part.strip() for part in pair.split(",")) for pair in between_ops.split(";") if pair.strip()}
    if not pairs or any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise ConfigError(f"between_ops is of the form 'Conv,Relu;Mul,Add', got {between_ops!r}.")
    return pairs


def remove_qdq_between(model: ir.Model, between_ops: str) -> int:
    """Let the second op of each pair in "A,B;C,D" read the first directly; return how many inputs changed.

    Raises:
        ConfigError: The text is of another form.
    """
    pairs, count = _pairs(between_ops), 0
    for node in [node for node in model.graph if node.op_type in DEQUANTIZE]:
        source = _float_source(node)
        producer = source.producer() if source is not None else None
        if source is None or producer is None:
            continue
        for use in list(node.outputs[0].uses()):
            if (producer.op_type, use.node.op_type) in pairs:
                use.node.replace_input_with(use.idx, source)
                count += 1
        prune(node)
    return count


def _float_source(decoder: ir.Node) -> ir.Value | None:
    """The float tensor that a pair quantizes, given its DequantizeLinear; None where there is no pair."""
    encoder = decoder.inputs[0].producer() if decoder.inputs[0] is not None else None
    return encoder.inputs[0] if encoder is not None and encoder.op_type in QUANTIZE else None


def _decode(graph: ir.Graph, node: ir.Node) -> bool:
    source = _float_source(node)
    if source is not None:
        return _bypass(node, source)
    codes, scale = constant(node.inputs[0]), constant(node.inputs[1])
    if codes is None or scale is None or node.outputs[0].is_graph_output():
        return False
    zero = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
    name = (node.name or "").removesuffix(f"_{node.op_type}")
    node.outputs[0].replace_all_uses_with(add_constant(graph, name, decode(codes, scale, zero, axis, block)))
    prune(node)
    return True


def decode(codes: NumpyArray, scale: NumpyArray, zero: NumpyArray | None, axis: int, block: int = 0) -> NumpyArray:
    """Codes to float32.

    Args:
        codes: Integers, or small floats, of any shape.
        scale: One number, one for each index of `axis`, or one for each block along it.
        zero: Of the shape of `scale`; None for zero.
        axis: The axis that scales differ along.
        block: Size of a block along it; 0 for none.
    """

    def spread(parameter: NumpyArray) -> NumpyArray:
        if block:
            return np.repeat(parameter, block, axis).take(np.arange(codes.shape[axis]), axis)
        if parameter.size == 1:
            return parameter.reshape(())
        return parameter.reshape([-1 if i == axis % codes.ndim else 1 for i in range(codes.ndim)])

    wide = np.int64 if codes.dtype.kind in "iu" else np.float32
    shifted: NumpyArray = codes.astype(wide)
    if zero is not None:
        shifted = shifted - spread(zero).astype(wide)
    return shifted.astype(np.float32) * spread(scale).astype(np.float32)


def _bypass(node: ir.Node, source: ir.Value) -> bool:
    """Let the readers of a node read another value; not where an input would become an output."""
    if not redirect(node.outputs[0], source):
        return False
    prune(node)
    return True
