"""Renames quantization operators between domains: standard, contributed, today's custom ones and those before."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.errors import NotSupportedError
from quark.onnx.graph.edit import remove_unused
from quark.onnx.graph.model_file import constant, opset
from quark.onnx.qdq.remove_qdq import DEQUANTIZE, QUANTIZE
from quark.onnx_ops.element_types import FIRST_OPSET

CUSTOM, FORMER, CONTRIB = "com.amd.quark", "com.vai.quantize", "com.microsoft"
FORMER_NAMES = {
    "ExtendedQuantizeLinear": "VitisQuantizeLinear",
    "ExtendedDequantizeLinear": "VitisDequantizeLinear",
    "ExtendedInstanceNormalization": "VitisInstanceNormalization",
    "ExtendedLSTM": "VitisLSTM",
    "BFPQuantizeDequantize": "BFPFixNeuron",
    "MXQuantizeDequantize": "MXFixNeuron",
}


def custom_to_standard(model: ir.Model) -> int:
    """Turn contributed and custom Q/DQ of integers into those of ONNX itself; return how many.

    Raises:
        NotSupportedError: The model's opset has no Q/DQ of a type.
    """
    count = 0
    for node in model.graph:
        if node.op_type not in (*QUANTIZE, *DEQUANTIZE) or node.domain == "":
            continue
        zero = constant(node.inputs[2]) if len(node.inputs) > 2 else None
        kind = "uint8" if zero is None else str(zero.dtype)
        first = FIRST_OPSET.get(kind.upper())
        if first is None or first > opset(model):
            advice = f"needs opset {first}: use convert_opset_version" if first else "has no standard form"
            raise NotSupportedError(f"{node.name}: Q/DQ of {kind} {advice}.")
        node.domain, node.op_type = "", QUANTIZE[0] if node.op_type in QUANTIZE else DEQUANTIZE[0]
        count += 1
    remove_unused(model)
    return count


def rename_custom_ops(model: ir.Model, reverse_conversion: bool = False) -> int:
    """Give custom operators the names and the domain they had before, or back; return how many."""
    pairs = {v: k for k, v in FORMER_NAMES.items()} if reverse_conversion else FORMER_NAMES
    old, new = (FORMER, CUSTOM) if reverse_conversion else (CUSTOM, FORMER)
    count = 0
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for graph in graphs:
        renamed = [node for node in graph.all_nodes() if node.domain == old and node.op_type in pairs]
        for node in renamed:
            node.domain, node.op_type = new, pairs[node.op_type]
        if renamed:
            graph.opset_imports[new] = 1
        count += len(renamed) if graph is model.graph else 0
    # What an operator computes is in the model itself, under the name that its nodes have.
    for key, function in list(model.functions.items()):
        if function.domain == old and function.name in pairs:
            function.domain, function.name = new, pairs[function.name]
            del model.functions[key]
            model.functions[function.identifier()] = function
    remove_unused(model)
    return count


def bfloat16_to_casts(model: ir.Model) -> int:
    """Turn custom Q/DQ of bfloat16 with scale 1 into Casts; return how many nodes."""
    count = 0
    for node in [node for node in model.graph if node.op_type in (*QUANTIZE, *DEQUANTIZE)]:
        zero = node.inputs[2] if len(node.inputs) > 2 else None
        if zero is None or zero.dtype != ir.DataType.BFLOAT16 or not np.all(constant(node.inputs[1]) == 1):
            continue
        to = ir.DataType.BFLOAT16 if node.op_type in QUANTIZE else ir.DataType.FLOAT
        node.resize_inputs(1)
        node.attributes.clear()
        node.attributes["to"] = ir.AttrInt64("to", int(to))
        node.domain, node.op_type = "", "Cast"
        count += 1
    remove_unused(model)
    return count
