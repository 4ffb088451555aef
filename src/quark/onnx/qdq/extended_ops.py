"""Nodes for types that ONNX has no Q/DQ for: the extended operators, or pairs of Cast for bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from quark.core.dtypes import DTYPES
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.onnx.graph.model_file import opset
from quark.onnx_ops import Operator, add_function_node, block, linear

if TYPE_CHECKING:
    from quark.onnx.qdq.rewriter import Rewriter

EXTENDED = {"bfloat16": "bfloat16", "bfloat16_scaled": "bfloat16", "float16": "float16"}
EXTENDED |= {"int32": "int32", "uint32": "uint32"}
"""Element types that ONNX has no Q/DQ for -> the type of the codes."""


def is_bfloat16(spec: TensorSpec) -> bool:
    """Whether the codes are bfloat16, scaled or not."""
    return EXTENDED.get(spec.dtype.name) == "bfloat16"


def linear_operator(op_type: str, spec: TensorSpec, axis: int | None) -> Operator | None:
    """The extended form of QuantizeLinear or DequantizeLinear for a spec; None where ONNX has its own."""
    kind = EXTENDED.get(spec.dtype.name)
    if kind is None:
        return None
    body = "cast" if spec.is_cast else "tensor" if axis is None else "axis"
    return linear(kind, body, axis)[op_type == "DequantizeLinear"]


def block_node(model: ir.Model, value: ir.Value, name: str, spec: TensorSpec) -> ir.Node:
    """The one node of a block format."""
    operator = block(spec, opset(model), None if value.shape is None else value.shape.dims)
    return add_function_node(model, operator, [value], f"{name}_DequantizeLinear")


def clip_bfloat16(rewriter: Rewriter, value: ir.Value, name: str) -> ir.Node:
    """A Clip to the range of bfloat16."""
    row = DTYPES["bfloat16"]
    limits = {"bfloat16_min": row.min, "bfloat16_max": row.max}
    bounds = [rewriter.initializer(key, np.asarray(limit, np.float32)) for key, limit in limits.items()]
    return _node("Clip", [value, *bounds], f"{name}_Clip")


def cast_down(rewriter: Rewriter, value: ir.Value, name: str, params: QParams, spec: TensorSpec) -> list[ir.Node]:
    """Cast to bfloat16, behind a product with 1 / scale if there is one."""
    nodes = []
    if not spec.is_cast:
        inverse = rewriter.initializer(f"{name}_inverse_scale", np.asarray(1 / params.scale, np.float32))
        nodes.append(_node("Mul", [value, inverse], f"{name}_Mul"))
        value = nodes[0].outputs[0]
    return [*nodes, _node("Cast", [value], f"{name}_QuantizeLinear", {"to": int(rewriter.ir.DataType.BFLOAT16)})]


def cast_up(rewriter: Rewriter, codes: ir.Value, name: str, params: QParams, spec: TensorSpec) -> list[ir.Node]:
    """Cast to float32, before a product with the scale if there is one."""
    back = _node("Cast", [codes], f"{name}_DequantizeLinear", {"to": int(rewriter.ir.DataType.FLOAT)})
    if spec.is_cast:
        return [back]
    scale = rewriter.initializer(f"{name}_scale", np.asarray(params.scale, np.float32))
    return [back, _node("Mul", [back.outputs[0], scale], f"{name}_DequantizeLinear_Mul")]


def _node(op_type: str, inputs: list[ir.Value], name: str, attributes: Any = ()) -> ir.Node:
    node = ir.node(op_type, inputs, dict(attributes), name=name)
    node.outputs[0].name = f"{name}_Output"
    return node
