"""Changes the integer type of activations in a quantized model.

same width     zero point' = zero point + (min' - min)        every float stays what it was, bit by bit
power of two   scale' = 2^n, zero' = 0, with the smallest n at which the old range fits
narrower       k = (max - min) / (max' - min')        scale' = k * scale        zero' = round((zero - min) / k) + min'
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.core.dtypes import DTYPES
from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import constant
from quark.onnx.qdq.remove_qdq import DEQUANTIZE, QUANTIZE
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
        node.attributes.pop("output_dtype", None)
        node.outputs[0].type = ir.TensorType(ir.DataType[target.upper()])
        count += 1
    return count


def resize_to_powers_of_two(model: ir.Model) -> int:
    """Give int8 pairs beside a Resize a scale that is a power of two and the zero point 0; return how many pairs.

    What shares its scale and zero point with such a pair and does not stand beside a Resize keeps both.
    """
    made: dict[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]] = {}
    count = 0
    for node in [node for node in model.graph if node.op_type in QUANTIZE]:
        readers = [use.node for use in node.outputs[0].uses()]
        if len(node.inputs) < 3 or node.outputs[0].is_graph_output() or not _beside_resize(node, readers):
            continue
        scale, zero = node.inputs[1], node.inputs[2]
        if scale is None or zero is None or not _is_one_int8_scale(scale, zero):
            continue
        if (scale, zero) not in made:
            steps, origin = constant(scale), constant(zero)
            reach = max(abs(-128 - int(origin.item())), abs(127 - int(origin.item()))) * float(steps.item()) / 128
            power = np.full(steps.shape, 2.0 ** np.ceil(np.log2(reach)), steps.dtype)
            made[scale, zero] = (
                add_constant(model.graph, f"{scale.name}_pof2", power),
                add_constant(model.graph, f"{zero.name}_pof2", np.zeros_like(origin)),
            )
        for changed in (node, *readers):
            for index, value in enumerate(made[scale, zero], 1):
                changed.replace_input_with(index, value)
        count += 1
    return count


def _is_one_int8_scale(scale: ir.Value, zero: ir.Value) -> bool:
    steps, origin = constant(scale), constant(zero)
    return steps is not None and origin is not None and steps.size == 1 and str(origin.dtype) == "int8"


def _beside_resize(encoder: ir.Node, decoders: list[ir.Node]) -> bool:
    """Return True where a pair stands before or after a Resize, and DequantizeLinear alone reads its codes."""
    if not decoders or any(node.op_type not in DEQUANTIZE for node in decoders):
        return False
    source = encoder.inputs[0]
    after = source is not None and is_op(source.producer(), "Resize")
    return after or any(
        is_op(use.node, "Resize") and use.idx == 0 for node in decoders for use in node.outputs[0].uses()
    )


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
