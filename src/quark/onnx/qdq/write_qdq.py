"""write_qdq: a placement becomes nodes and constants: Q/DQ around activations, codes after DQ, integer kernels.

Dynamic quantization: the input is quantized as it comes, and the product is computed in integers.

    q, s, z = DynamicQuantizeLinear(x)                            uint8, range of each tensor
    y = float(MatMulInteger(q, w, z, zw)) * (s * sw) + bias       ConvInteger likewise

ONNX Runtime fuses the MatMul form into one kernel. The factors of a Gemm go into the scales and the bias, and codes of
its first matrix are transposed where it says so.

MatMulNBits (com.microsoft): a MatMul whose constant operand has 2 to 8 bits in blocks along the sum.

    y = x @ ((q - zero_point) * scale)      q (K, N), one scale for each `block_size` values of a column

Stored by column: B uint8 (N, blocks, block_size * bits / 8), first code in the low bits; scales float32 (N, blocks);
zero points packed like codes (N, ceil(blocks * bits / 8)), absent for 2^(bits-1); those of HQQ are floats (N, blocks).
Scales and float zero points have the type of x.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray, pad_axis
from quark.core.granularity import PerGroup
from quark.core.packing import pack_bits
from quark.core.quantize import quantize
from quark.core.spec import ScaleType, TensorSpec
from quark.onnx.calibration.qparams import ModelQParams
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import carried_over, is_op
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.operators import output_axis
from quark.onnx.placement.dual_pairs import drop_identities
from quark.onnx.placement.kernels import DYNAMIC_KERNELS
from quark.onnx.placement.placement import Placement
from quark.onnx.qdq.activations import ActivationWriter
from quark.onnx.qdq.constants import ConstantStore
from quark.onnx.qdq.stored_weights import LSTM_KERNEL, picks_codes, write_lstm, write_table
from quark.onnx_ops.graph_writer import GraphWriter, producer_of


def write_qdq(
    model: ir.Model, settings: Settings, placement: Placement, qparams: ModelQParams
) -> dict[ir.Node, ir.Node]:
    """Write everything that a placement says, drop what nothing uses any more, and sort.

    Args:
        model: Changed in place.
        settings: Domain and cast options.
        placement: What to write.
        qparams: Scales and zero points.

    Returns:
        Each node that another stands for now -> that one.
    """
    writer = GraphWriter(model)
    store = ConstantStore(writer, settings, qparams.weights)
    dynamic, replaced = set(placement.dynamic), dict[ir.Node, ir.Node]()
    for operand, spec in placement.weights.items():
        node = operand[0]
        if is_op(node, "LSTM") and node in dynamic:
            write_lstm(writer, store, node, {index: placement.weights[node, index] for index in (1, 2)})
        elif node.op_type == LSTM_KERNEL:
            continue  # written with its other matrix
        elif picks_codes(node, spec):
            replaced[node] = producer_of(write_table(writer, store, node, spec))
        elif node in dynamic:
            replaced[node] = producer_of(_write_dynamic(writer, store, node, spec))
        elif settings.qdq.matmul_nbits is not None:
            replaced[node] = producer_of(_write_nbits(writer, store, node, spec, settings.qdq.matmul_nbits))
        else:
            store.write_weight(operand, spec)
    for operand, weight in placement.weights_of_biases.items():
        data = weight[0].inputs[0]
        assert data is not None
        params = qparams.activations.get(placement.root(data))
        if data in placement.activations and params is not None and weight in qparams.weights:
            store.write_bias(operand, weight, placement.weights[weight], params)
    activations = ActivationWriter(writer, settings, placement, qparams.activations)
    for value, spec in placement.activations.items():
        activations.write(value, spec)
    drop_identities(model.graph)
    drop_unused_constants(model.graph)
    model.graph.sort()
    return replaced


def drop_unused_constants(graph: ir.Graph) -> None:
    """Drop the initializers that nothing reads, in no body either."""
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


# Inputs quantized as they come ----------------------------------------------------------------------------------------


def _write_dynamic(writer: GraphWriter, store: ConstantStore, node: ir.Node, spec: TensorSpec) -> ir.Value:
    """Replace a node by its integer form.

    Args:
        writer, store: Of the model.
        node: Of a form that has an integer kernel (`fits_dynamic`).
        spec: Of its weight.

    Returns:
        Its output.
    """
    name, data, is_conv = node.name or "", node.inputs[0], node.op_type == "Conv"
    assert data is not None
    has_rows_of_outputs = node.op_type == "Gemm" and output_axis(node) == 0
    codes, scale, zero = store.encoded((node, 1), spec, transpose=has_rows_of_outputs)
    if is_conv:
        scale = _over_outputs(writer, node, scale)
        zero = writer.shared(f"{zero.name}_scalar", np.asarray(constant(zero).reshape(-1)[0]))
    quantized, input_scale, input_zero = _quantized_input(writer, data)
    if node.attributes.get_int("transA", 0):
        quantized = writer.node("Transpose", [quantized], f"{name}_turned", {"perm": [1, 0]})
    scale = _multiplied(writer, node, scale, "alpha")
    inputs, kernel = [quantized, codes, input_zero, zero], DYNAMIC_KERNELS[node.op_type]
    attributes = carried_over(node, kernel, alpha=None, beta=None, transA=None, transB=None)
    product = writer.node(kernel, inputs, f"{name}_quant", attributes)
    product = writer.node("Cast", [product], f"{name}_cast", {"to": int(ir.DataType.FLOAT)})
    scales = writer.node("Mul", [input_scale, scale], f"{name}_scales")
    result = writer.node("Mul", [product, scales], f"{name}_scaled")
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:
        bias = _over_outputs(writer, node, bias) if is_conv else _multiplied(writer, node, bias, "beta")
        result = writer.node("Add", [result, bias], f"{name}_bias")
    writer.replace(node, result, keep_name=True)
    return result


def _quantized_input(writer: GraphWriter, data: ir.Value) -> Sequence[ir.Value]:
    """Codes, scale and zero point of an input; all nodes that read it share one DynamicQuantizeLinear."""
    for use in data.uses():
        if use.node.op_type == "DynamicQuantizeLinear":
            return use.node.outputs
    outputs = writer.dynamic_codes(data, f"{data.name}_QuantizeLinear")
    writer.insert_after(data.producer())
    return outputs


def _multiplied(writer: GraphWriter, node: ir.Node, value: ir.Value, factor: str) -> ir.Value:
    """A scale or bias times alpha or beta of a Gemm."""
    number = node.attributes.get_float(factor, 1.0)
    if number == 1.0:
        return value
    name = f"{value.name}_{node.name}_{factor}"
    if is_constant(value):
        return writer.shared(name, np.asarray(constant(value), np.float32) * np.float32(number))
    return writer.node("Mul", [value, writer.shared(f"{name}_factor", np.asarray(number, np.float32))], name)


def _over_outputs(writer: GraphWriter, node: ir.Node, channels: ir.Value) -> ir.Value:
    """A vector over the channels of a Conv as (C, 1, ...), which broadcasts over its output."""
    array = np.asarray(constant(channels), np.float32)
    spatial = constant(node.inputs[1]).ndim - 2
    return writer.shared(f"{channels.name}_{node.name}", array.reshape(-1, *[1] * spatial))


# MatMulNBits ----------------------------------------------------------------------------------------------------------


DOMAIN = "com.microsoft"


def _write_nbits(
    writer: GraphWriter, store: ConstantStore, node: ir.Node, spec: TensorSpec, accuracy_level: int
) -> ir.Value:
    """Replace a MatMul by a MatMulNBits of the same name.

    Args:
        writer, store: Of the model.
        node: With a weight that fits (`fits_nbits`).
        spec: Of the weight.
        accuracy_level: 0 to 4: the type that the kernel may compute in.

    Returns:
        Its output.
    """
    assert isinstance(spec.granularity, PerGroup)
    operand, source, qparams = (node, 1), node.inputs[1], store.qparams
    rows, columns = constant(source).shape
    bits, size = spec.dtype.bits, spec.granularity.size
    blocks = -(-rows // size)
    kind = ir.DataType.FLOAT16 if spec.scale_type is ScaleType.float16 else ir.DataType.FLOAT
    offset = 1 << (bits - 1) if spec.dtype.signed else 0

    def codes() -> NumpyArray:
        signed = np.asarray(quantize(np.asarray(constant(source), np.float32), qparams[operand], spec))
        by_column = np.ascontiguousarray((signed + offset).astype(np.uint8).T)
        packed = pack_bits(pad_axis(by_column, 1, blocks * size - rows), bits)
        return np.asarray(packed).reshape(columns, blocks, size * bits // 8)

    def scales() -> NumpyArray:
        return np.asarray(qparams[operand].scale, np.float32).astype(kind.numpy()).T

    def float_zero_points() -> NumpyArray:
        return np.asarray(qparams[operand].zero_point, np.float32).astype(kind.numpy()).T

    def zero_points() -> NumpyArray:
        by_column = np.ascontiguousarray((np.asarray(qparams[operand].zero_point) + offset).astype(np.uint8).T)
        return np.asarray(pack_bits(pad_axis(by_column, 1, -blocks % (8 // bits)), bits))

    name, uint8 = store.name(operand, spec), ir.DataType.UINT8
    inputs = [
        node.inputs[0],
        writer.shared(f"{name}_quantized", codes, uint8, (columns, blocks, size * bits // 8)),
        writer.shared(f"{name}_scale", scales, kind, (columns, blocks)),
    ]
    if spec.float_zero_point:
        inputs.append(writer.shared(f"{name}_zero_point", float_zero_points, kind, (columns, blocks)))
    elif not spec.symmetric:
        inputs.append(writer.shared(f"{name}_zero_point", zero_points, uint8, (columns, -(-blocks * bits // 8))))
    attributes = {"K": rows, "N": columns, "bits": bits, "block_size": size, "accuracy_level": accuracy_level}
    result = writer.node("MatMulNBits", inputs, f"{node.name}_{bits}_bits", attributes, domain=DOMAIN)
    writer.replace(node, result, keep_name=True)
    producer_of(result).name = node.name
    return result
