"""function_nodes: how many nodes the functions of block formats become, which ONNX Runtime writes out at each call.

    nodes = sum over quantized tensors of the nodes of the body of their format

That is known as soon as tensors are placed: too many are refused before anything is calibrated or computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from quark.core.spec import TensorSpec
from quark.errors import NotSupportedError
from quark.onnx.graph.check_proto import MOST_NODES
from quark.onnx.placement.placement import Placement
from quark.onnx_ops.operators import block, function


def refuse_too_many(model: ir.Model, placement: Placement) -> None:
    """Raise NotSupportedError where ONNX Runtime would not load what is written."""
    opset, calls, sizes = model.opset_imports[""], 0, dict[tuple[str, str], int]()
    nodes = 0
    for value, spec in _tensors(placement):
        if not spec.is_block:
            continue
        operator = block(spec, opset, None if value.shape is None else value.shape.dims)
        key = (operator.name, operator.overload)
        if key not in sizes:
            sizes[key] = len(function(operator, opset).node)
        calls, nodes = calls + 1, nodes + sizes[key]
    if nodes > MOST_NODES:
        raise NotSupportedError(
            f"{calls} tensors of block formats are functions of {nodes} nodes in all, and ONNX Runtime takes "
            f"a minute to load {MOST_NODES}. Possible: fewer nodes (exclude), weights alone (WeightsOnly), or a format "
            "without blocks, such as BF16."
        )


def _tensors(placement: Placement) -> Iterator[tuple[ir.Value, TensorSpec]]:
    for (node, index), spec in placement.weights.items():
        value = node.inputs[index]
        if value is not None:
            yield value, spec
    yield from placement.activations.items()
