"""write_qdq: a placement becomes nodes and constants: Q/DQ around activations, codes behind DQ, integer kernels."""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.calibration.qparams import ModelQParams
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import is_op
from quark.onnx.placement.dual_pairs import drop_identities
from quark.onnx.placement.placement import Placement
from quark.onnx.qdq.activations import ActivationWriter
from quark.onnx.qdq.constants import ConstantStore
from quark.onnx.qdq.dynamic_quantize import write_dynamic
from quark.onnx.qdq.matmul_nbits import write_nbits
from quark.onnx.qdq.stored_weights import LSTM_KERNEL, picks_codes, write_lstm, write_table
from quark.onnx_ops.graph_writer import GraphWriter, producer_of


def write_qdq(
    model: ir.Model, settings: Settings, placement: Placement, qparams: ModelQParams
) -> dict[ir.Node, ir.Node]:
    """Write everything that a placement says, drop what nothing uses any more, and sort.

    Args:
        model: Changed in place.
        settings: Domain and cast options.
        placement: What to write.
        qparams: Scales and zero points.

    Returns:
        Each node that another stands for now -> that one.
    """
    writer = GraphWriter(model)
    store = ConstantStore(writer, settings, qparams.weights)
    dynamic, replaced = set(placement.dynamic), dict[ir.Node, ir.Node]()
    for operand, spec in placement.weights.items():
        node = operand[0]
        if is_op(node, "LSTM") and node in dynamic:
            write_lstm(writer, store, node, {index: placement.weights[node, index] for index in (1, 2)})
        elif node.op_type == LSTM_KERNEL:
            continue  # written with its other matrix
        elif picks_codes(node, spec):
            replaced[node] = producer_of(write_table(writer, store, node, spec))
        elif node in dynamic:
            replaced[node] = producer_of(write_dynamic(writer, store, node, spec))
        elif settings.qdq.matmul_nbits is not None:
            replaced[node] = producer_of(write_nbits(writer, store, node, spec, settings.qdq.matmul_nbits))
        else:
            store.write_weight(operand, spec)
    for operand, weight in placement.weights_of_biases.items():
        data = weight[0].inputs[0]
        assert data is not None
        params = qparams.activations.get(placement.root(data))
        if data in placement.activations and params is not None and weight in qparams.weights:
            store.write_bias(operand, weight, placement.weights[weight], params)
    activations = ActivationWriter(writer, settings, placement, qparams.activations)
    for value, spec in placement.activations.items():
        activations.write(value, spec)
    drop_identities(model.graph)
    drop_unused_constants(model.graph)
    model.graph.sort()
    return replaced


def drop_unused_constants(graph: ir.Graph) -> None:
    """Drop the initializers that nothing reads, in no body either."""
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
