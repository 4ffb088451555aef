"""Folds BatchNormalization into the Conv, ConvTranspose or Gemm before it.

    W' = W * gamma / sqrt(var + eps)        b' = (b - mean) * gamma / sqrt(var + eps) + beta

Not folded: a convolution whose output or whose weight anything else reads (its float values would change there).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quark.onnx.model import constant

if TYPE_CHECKING:
    import onnx_ir as ir

Array = np.ndarray[Any, Any]
FOLDS_INTO = {"Conv": 0, "ConvTranspose": 1, "Gemm": None}


def fold_batch_norm(model: ir.Model) -> int:
    """Fold every BatchNormalization that can be; return how many were."""
    count = 0
    for node in list(model.graph):
        if node.op_type == "BatchNormalization" and _fold(model, node):
            count += 1
    return count


def _fold(model: ir.Model, norm: ir.Node) -> bool:
    source = norm.inputs[0]
    producer = source.producer() if source is not None else None
    if source is None or producer is None or producer.op_type not in FOLDS_INTO:
        return False
    if len(list(source.uses())) != 1 or source.is_graph_output() or len(norm.outputs) != 1:
        return False
    weight_value = producer.inputs[1]
    bias_value = producer.inputs[2] if len(producer.inputs) > 2 else None
    weight = constant(weight_value)
    gamma, beta, mean, variance = (constant(norm.inputs[i]) for i in range(1, 5))
    if weight is None or any(p is None for p in (gamma, beta, mean, variance)):
        return False
    if (bias_value is not None and constant(bias_value) is None) or len(list(weight_value.uses())) != 1:  # type: ignore[union-attr]
        return False
    groups = producer.attributes.get("group")
    if producer.op_type == "ConvTranspose" and groups is not None and groups.as_int() != 1:
        return False
    epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else 1e-5
    factor = gamma.astype(np.float64) / np.sqrt(variance.astype(np.float64) + epsilon)
    axis = FOLDS_INTO[producer.op_type]
    if axis is None:
        transposed = producer.attributes.get("transB")
        axis = 0 if transposed is not None and transposed.as_int() else 1
    shape = [1] * weight.ndim
    shape[axis] = -1
    bias = np.zeros(len(factor)) if bias_value is None else constant(bias_value).astype(np.float64)
    folded = (weight * factor.reshape(shape)).astype(weight.dtype)
    shifted = ((bias - mean) * factor + beta).astype(weight.dtype)
    assert weight_value is not None
    _set(weight_value, folded)
    if bias_value is not None and len(list(bias_value.uses())) == 1:
        _set(bias_value, shifted)
    else:
        if bias_value is None:
            producer.resize_inputs(3)
        producer.replace_input_with(2, _new_initializer(model, f"{producer.name}_bias", shifted))
    output = norm.outputs[0]
    name, is_output = output.name, output.is_graph_output()
    for use in list(output.uses()):
        use.node.replace_input_with(use.idx, source)
    if is_output:
        for position, value in enumerate(model.graph.outputs):
            if value is output:
                model.graph.outputs[position] = source
    source.shape, source.type = output.shape or source.shape, output.type or source.type
    model.graph.remove(norm, safe=True)
    source.name = name
    return True


def _set(value: ir.Value, array: Array) -> None:
    """Give an initializer new values under its name."""
    import onnx_ir as ir

    value.const_value = ir.tensor(array, name=value.name)


def _new_initializer(model: ir.Model, name: str, array: Array) -> ir.Value:
    import onnx_ir as ir

    while name in model.graph.initializers:
        name += "_folded"
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))
    model.graph.initializers[name] = value
    return value
