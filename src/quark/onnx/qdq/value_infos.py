"""Type and shape of every tensor of a quantized model: what ONNX infers, what Q/DQ say, and what one run shows.

ONNX infers nothing after operators of other domains. Q/DQ keep the shape of what they read; of the rest, one sample
shows type and rank. Its sizes hold for every sample only where the shapes of all inputs are fixed: others stay open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

from quark.errors import NotSupportedError
from quark.onnx.graph.model_file import infer_types

QUANTIZE = ("QuantizeLinear", "ExtendedQuantizeLinear")
DEQUANTIZE = ("DequantizeLinear", "ExtendedDequantizeLinear")
_BOTH = ("BFPQuantizeDequantize", "MXQuantizeDequantize")

Run = Callable[[list[str]], Mapping[str, Any]]


def fill_value_infos(model: ir.Model, run: Run) -> int:
    """Give every tensor within a model its type and shape.

    Args:
        model: The model, changed in place.
        run: Names of tensors -> their arrays for one sample; called where types or shapes are still unknown.

    Returns:
        How many tensors got one.

    Raises:
        NotSupportedError: A tensor within a body of If or Loop is unknown, which no run shows.
    """
    before = len(_unknown(model))
    while True:
        count = len(_unknown(model))
        for node in model.graph.all_nodes():
            _through_qdq(node)
        infer_types(model, _unknown(model))
        if len(_unknown(model)) == count:
            break
    _by_running(model, run)
    return before


def _unknown(model: ir.Model) -> list[ir.Value]:
    """The tensors whose type or rank nobody has said."""
    outputs = [value for node in model.graph.all_nodes() for value in node.outputs if value.name]
    return [
        value
        for value in outputs
        if value.type is None or ((value.type is None or isinstance(value.type, ir.TensorType)) and value.shape is None)
    ]


def _through_qdq(node: ir.Node) -> None:
    """Shape and type after a node that quantizes or decodes."""
    if node.op_type not in (*QUANTIZE, *DEQUANTIZE, *_BOTH):
        return
    source, output = node.inputs[0], node.outputs[0]
    says = (
        node.inputs[0] if node.op_type in _BOTH else node.inputs[1] if node.op_type in DEQUANTIZE else node.inputs[-1]
    )
    if source is not None and output.shape is None:
        output.shape = source.shape
    if says is not None and output.type is None and says.dtype is not None:
        output.type = ir.TensorType(says.dtype)


def _by_running(model: ir.Model, run: Run) -> None:
    unknown = {value.name or "": value for value in _unknown(model)}
    if not unknown:
        return
    outside = {output.name for node in model.graph for output in node.outputs}
    hidden = sorted(set(unknown) - outside)
    if hidden:
        raise NotSupportedError(f"FillAllValueInfo: the shape of {hidden[0]} is unknown within a body of If or Loop.")
    inputs = [value for value in model.graph.inputs if not value.is_initializer()]
    fixed = all(value.shape is not None and value.shape.is_static() for value in inputs)
    for name, array in run(list(unknown)).items():
        value = unknown[name]
        value.type = value.type or ir.TensorType(ir.DataType.from_numpy(array.dtype))
        value.shape = value.shape or ir.Shape(array.shape if fixed else [None] * array.ndim)
