"""Changes the integer type of activations in a quantized model.

same width     zero point' = zero point + (min' - min)        every float stays what it was, bit by bit
narrower       k = (max - min) / (max' - min')        scale' = k * scale        zero' = round((zero - min) / k) + min'
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.core.dtypes import DTYPES
from quark.onnx.converters.remove_qdq import DEQUANTIZE, QUANTIZE
from quark.onnx.graph.model_file import constant
from quark.onnx_ops.graph_writer import add_constant


def shift_codes(model: ir.Model, source: str, target: str) -> int:
    """Give activations of one integer type another; return how many. Stored weights and biases keep theirs."""
    count = 0
    made: dict[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]] = {}
    for node in [node for node in model.graph if node.op_type in QUANTIZE]:
        zero = constant(node.inputs[2]) if len(node.inputs) > 2 else None
        readers = [use.node for use in node.outputs[0].uses()]
        if zero is None or str(zero.dtype) != source or node.outputs[0].is_graph_output():
            continue
        if any(reader.op_type not in DEQUANTIZE or constant(reader.inputs[2]) is None for reader in readers):
            continue
        for changed in (node, *readers):
            _change(model.graph, changed, target, made)
        _set_type(node, target)
        count += 1
    return count


def _change(
    graph: ir.Graph, node: ir.Node, target: str, made: dict[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]]
) -> None:
    """Give a node the scale and zero point of the new type; those that nodes share stay shared."""
    scale, zero = node.inputs[1], node.inputs[2]
    assert scale is not None and zero is not None
    if (scale, zero) not in made:
        old, new = DTYPES[str(constant(zero).dtype)], DTYPES[target]
        ratio = (old.max - old.min) / (new.max - new.min)
        codes = np.rint((constant(zero).astype(np.float64) - old.min) / ratio) + new.min
        widened = (
            scale if ratio == 1 else add_constant(graph, f"{scale.name}_{target}", constant(scale) * np.float32(ratio))
        )
        made[scale, zero] = widened, add_constant(graph, f"{zero.name}_{target}", codes.astype(target))
    for index, value in enumerate(made[scale, zero], 1):
        node.replace_input_with(index, value)


def _set_type(node: ir.Node, target: str) -> None:
    node.attributes.pop("output_dtype", None)
    node.outputs[0].type = ir.TensorType(ir.DataType[target.upper()])
