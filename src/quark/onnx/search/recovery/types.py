"""The element types of a quantized model, read off its nodes: what it is, whatever was asked for."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from quark.onnx.graph.model_file import is_constant


def element_types(model: ir.Model) -> dict[tuple[str, str], int]:
    """(element type, "activations" or "weights") -> how many tensors of a quantized model have it.

    Codes of int32 are biases, which follow from the rest, and are not counted. A block format counts by the name of its
    operator.
    """
    found: Counter[tuple[str, str]] = Counter()
    for node in model.graph:
        quantizes = node.op_type.endswith("QuantizeLinear") and "Dynamic" not in node.op_type
        decodes = node.op_type.endswith("DequantizeLinear") and is_constant(node.inputs[0])
        zero = node.inputs[2] if len(node.inputs) > 2 else None
        if (quantizes or decodes) and zero is not None and zero.dtype is not None and zero.dtype.name != "INT32":
            found[zero.dtype.name.lower(), "weights" if decodes else "activations"] += 1
        elif node.op_type.endswith("QuantizeDequantize"):
            found[node.op_type, "weights" if is_constant(node.inputs[0]) else "activations"] += 1
    return dict(found)
