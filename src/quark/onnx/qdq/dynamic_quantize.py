"""Dynamic quantization: the input is quantized as it comes, the product is computed in integers.

    q, s, z = DynamicQuantizeLinear(x)                            uint8, range of each tensor
    y = float(MatMulInteger(q, w, z, zw)) * (s * sw) + bias       ConvInteger likewise

ONNX Runtime fuses the MatMul form into one kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.model_file import constant
from quark.onnx.placement.kernels import DYNAMIC_KERNELS

if TYPE_CHECKING:
    from quark.onnx.qdq.rewriter import Rewriter


def write_dynamic(rewriter: Rewriter, node: ir.Node) -> None:
    """Replace a node by its integer form."""
    ir, name = rewriter.ir, node.name or ""
    weight, spec = node.inputs[1], rewriter.placement.weights[node, 1]
    assert weight is not None and node.inputs[0] is not None
    codes, scale, zero = rewriter.encoded(node, 1, spec, transpose=_is_transposed(node))
    if node.op_type == "Conv":
        scale = _shaped(rewriter, node, scale)
        zero = rewriter.initializer(f"{zero.name}_scalar", np.asarray(constant(zero).reshape(-1)[0]))
    quantized, input_scale, input_zero = _quantized_input(rewriter, node.inputs[0], node)
    attributes = node.attributes.values() if node.op_type == "Conv" else ()
    product = ir.Node(
        "", DYNAMIC_KERNELS[node.op_type], [quantized, codes, input_zero, zero], attributes, name=f"{name}_quant"
    )
    steps = [product]
    steps.append(ir.node("Cast", [product.outputs[0]], {"to": int(ir.DataType.FLOAT)}, name=f"{name}_cast"))
    steps.append(ir.node("Mul", [input_scale, scale], name=f"{name}_scales"))
    steps.append(ir.node("Mul", [steps[1].outputs[0], steps[2].outputs[0]], name=f"{name}_scaled"))
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:
        bias = _shaped(rewriter, node, bias) if node.op_type == "Conv" else bias
        steps.append(ir.node("Add", [steps[-1].outputs[0], bias], name=f"{name}_bias"))
    for step in steps:
        step.outputs[0].name = f"{step.name}_Output"
    rewriter.replace(node, steps)


def _is_transposed(node: ir.Node) -> bool:
    attribute = node.attributes.get("transB")
    return attribute is not None and bool(attribute.as_int())


def _quantized_input(rewriter: Rewriter, value: ir.Value, node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Codes, scale and zero point of an input; all nodes that read it share one DynamicQuantizeLinear."""
    name = f"{value.name}_QuantizeLinear"
    for use in value.uses():
        if use.node.op_type == "DynamicQuantizeLinear":
            codes, scale, zero = use.node.outputs
            return codes, scale, zero
    step = rewriter.ir.node("DynamicQuantizeLinear", [value], num_outputs=3, name=name)
    for output, suffix in zip(step.outputs, ("Output", "scale", "zero_point"), strict=True):
        output.name = f"{name}_{suffix}"
    producer = value.producer()
    if producer is None:
        rewriter.graph.insert_before(rewriter.graph[0], [step])
    else:
        rewriter.graph.insert_after(producer, [step])
    codes, scale, zero = step.outputs
    return codes, scale, zero


def _shaped(rewriter: Rewriter, node: ir.Node, channels: ir.Value) -> ir.Value:
    """A vector over the channels of a Conv as (C, 1, ...), which broadcasts over its output."""
    array = np.asarray(constant(channels), np.float32)
    spatial = constant(node.inputs[1]).ndim - 2
    return rewriter.initializer(f"{channels.name}_{node.name}", array.reshape(-1, *[1] * spatial))
