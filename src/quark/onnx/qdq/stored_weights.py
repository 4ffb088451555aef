"""Stored weights of nodes that Q/DQ does not reach: an LSTM in integers, and tables whose rows are picked as codes.

LSTM      com.microsoft DynamicQuantizeLSTM(x, W', R', ..., sW, zW, sR, zR)      W', R' (directions, sum, gates)
Gather    y = (T_q[i] - z) * s              one scale: DequantizeLinear after the Gather
y = (T_q[i] - z[i]) * s[i]        one for each row: the scales are picked, too
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.core.granularity import PerGroup, PerTensor
from quark.core.spec import TensorSpec
from quark.onnx.graph.edit import carried_over, is_op
from quark.onnx.graph.model_file import constant
from quark.onnx.qdq.constants import ConstantStore
from quark.onnx.qdq.qdq_nodes import CONTRIB, QdqNodes
from quark.onnx_ops.graph_writer import GraphWriter

LSTM_KERNEL = "DynamicQuantizeLSTM"
_LSTM_INPUTS = 12
"""Of a DynamicQuantizeLSTM: the 8 of an LSTM, then scale and zero point of W and of R."""


def write_lstm(writer: GraphWriter, store: ConstantStore, node: ir.Node, specs: dict[int, TensorSpec]) -> None:
    """Make an LSTM one that computes its products in integers, from inputs and states that it quantizes as they come.

    Args:
        writer, store: Of the model.
        node: Of a form that has the kernel (`fits_lstm_kernel`); keeps its name and outputs.
        specs: Index -> spec of W and R.
    """
    inputs = [*node.inputs, *[None] * (_LSTM_INPUTS - len(node.inputs))]
    for index, spec in specs.items():
        codes, *qparams = store.encoded((node, index), spec, transpose=True)
        directions = len(constant(node.inputs[index]))
        inputs[index] = codes
        for position, value in enumerate(qparams, _LSTM_INPUTS - 6 + 2 * index):
            array = constant(value)
            # One for each direction, or for each output of each direction.
            shape = (directions,) if array.size == directions else (directions, array.size // directions)
            inputs[position] = writer.shared(f"{value.name}_{node.name}", array.reshape(shape))
    attributes = carried_over(node, LSTM_KERNEL, CONTRIB)
    for attribute in set(node.attributes) - set(attributes):
        del node.attributes[attribute]
    node.op_type, node.domain = LSTM_KERNEL, CONTRIB
    node.version = None
    node.resize_inputs(_LSTM_INPUTS)
    for index, input_value in enumerate(inputs):
        node.replace_input_with(index, input_value)
    writer.model.opset_imports.setdefault(CONTRIB, 1)


def picks_codes(node: ir.Node, spec: TensorSpec) -> bool:
    """Return True where a node is a Gather that can pick codes: under one scale, or rows with what decodes them."""
    if not is_op(node, "Gather") or spec.is_block:
        return False
    table = constant(node.inputs[0])
    return isinstance(spec.granularity, PerTensor) or (
        table.ndim == 2 and node.attributes.get_int("axis", 0) in (0, -2)
    )


def write_table(writer: GraphWriter, store: ConstantStore, node: ir.Node, spec: TensorSpec) -> ir.Value:
    """Replace a Gather of float rows by one of codes, and what decodes them.

    Returns:
        Its output.
    """
    name, indices = node.name or "", node.inputs[1]
    codes, scale, zero = store.encoded((node, 0), spec)
    if isinstance(spec.granularity, PerGroup):
        attributes = carried_over(
            node,
            "GatherBlockQuantized",
            CONTRIB,
            axis=None,
            gather_axis=0,
            quantize_axis=1,
            block_size=spec.granularity.size,
        )
        inputs = [codes, indices, scale, zero]
        result = writer.node("GatherBlockQuantized", inputs, f"{name}_quantized", attributes, domain=CONTRIB)
        writer.replace(node, result, keep_name=True)
        return result
    rows = writer.node("Gather", [codes, indices], f"{name}_quantized", carried_over(node, "Gather"))
    if constant(scale).ndim == 0:
        nodes = QdqNodes(writer, store.settings, codes.name or "", reader=node)
        result = nodes.linear("DequantizeLinear", [rows, scale, zero], spec)
    else:
        kind = ir.DataType.from_numpy(constant(scale).dtype)
        result = writer.cast(rows, kind, f"{name}_cast")
        for op_type, factors in (("Sub", constant(zero).astype(constant(scale).dtype)), ("Mul", constant(scale))):
            if op_type == "Sub" and not factors.any():
                continue
            column = writer.shared(f"{scale.name}_{op_type}_rows", np.asarray(factors).reshape(-1, 1))
            picked = writer.node("Gather", [column, indices], f"{name}_{op_type}_rows")
            result = writer.node(op_type, [result, picked], f"{name}_{op_type}")
    writer.replace(node, result, keep_name=True)
    return result
