"""Dynamic quantization: the input is quantized as it comes, the product is computed in integers.

    q, s, z = DynamicQuantizeLinear(x)                            uint8, range of each tensor
    y = float(MatMulInteger(q, w, z, zw)) * (s * sw) + bias       ConvInteger likewise

ONNX Runtime fuses the MatMul form into one kernel. The factors of a Gemm go into the scales and the bias, and codes of
its first matrix are transposed where it says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from quark.core.spec import TensorSpec
from quark.onnx.graph.edit import carried_over
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.operators.axes import output_axis
from quark.onnx.placement.kernels import DYNAMIC_KERNELS
from quark.onnx.qdq.constants import ConstantStore
from quark.onnx_ops.graph_writer import GraphWriter


def write_dynamic(writer: GraphWriter, store: ConstantStore, node: ir.Node, spec: TensorSpec) -> ir.Value:
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
