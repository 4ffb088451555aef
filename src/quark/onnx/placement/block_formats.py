"""Where the blocks of block formats lie in a placement: along which axis of a tensor; and how many nodes they become.

The axis is that which the reader of a tensor multiplies and sums over, as the rule of it says. What several nodes read
follows the first of them; what none of these reads follows the node that writes it, then the axis of the spec, or the
last one where the tensor has fewer. A tensor without axes has no blocks: it stays in float.

    nodes = sum over quantized tensors of the nodes of the body of their format, which ONNX Runtime writes out at a call

That is known as soon as tensors are placed: too many are refused before anything is calibrated or computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import onnx_ir as ir

from quark.core.granularity import PerGroup
from quark.core.spec import TensorSpec
from quark.errors import NotSupportedError
from quark.onnx.graph.check_proto import MOST_NODES
from quark.onnx.operators import data_axis, input_axis, result_axis, rule_of
from quark.onnx.placement.placement import Placement
from quark.onnx_ops.operators import block, function


def refine_block_axes(placement: Placement, refine: bool) -> None:
    """Give every blocked tensor of a placement its axis.

    Args:
        placement: Changed in place.
        refine: Whether the ops decide; else only axes that a tensor does not have are moved to its last one.
    """
    quantized = set(placement.nodes)
    for value, spec in list(placement.activations.items()):
        if not spec.is_block:
            continue
        axes = [_summed_axis(use.node, use.idx) for use in value.uses() if use.node in quantized]
        producer = value.producer()
        if producer is not None and producer in quantized:
            axes.append(result_axis(producer))
        if _rank(value) == 0:
            del placement.activations[value]
        else:
            placement.activations[value] = _along(spec, value, axes if refine else [])
    for (node, index), spec in list(placement.weights.items()):
        weight = node.inputs[index]
        if weight is None or not spec.is_block:
            continue
        if _rank(weight) == 0:
            del placement.weights[node, index]
        else:
            placement.weights[node, index] = _along(spec, weight, [_summed_axis(node, index)] if refine else [])


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _along(spec: TensorSpec, value: ir.Value, axes: list[int | None]) -> TensorSpec:
    """The spec with the first axis that is known, within those of the tensor."""
    assert isinstance(spec.granularity, PerGroup)
    axis, rank = next((axis for axis in axes if axis is not None), spec.granularity.axis), _rank(value)
    if rank is not None and not -rank <= axis < rank:
        axis = rank - 1 if axis > 0 else 0
    return replace(spec, granularity=replace(spec.granularity, axis=axis))


def _summed_axis(node: ir.Node, index: int) -> int | None:
    """Axis of an input that a node multiplies and sums over; None for a bias, and an op that sums over none."""
    if index == 0:
        return data_axis(node)
    return input_axis(node) if index == rule_of(node.op_type).weight else None


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
