"""Moves a constant factor of a tensor into the convolutions that read it, over constants that are added between.

    conv(f x, W) = conv(x, f W)        conv(f x + b, W) = conv(x + b / f, f W)

Exact with zeros as padding, as those of a Conv are. A hard-swish, x clip(x + 3, 0, 6) / 6, with a learned scale and
shift after it, loses the / 6 and the scale: two roundings less once it is quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.channels import unshared
from quark.onnx.graph.edit import dims, is_op, prune, read_once, set_initializer
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.graph.pattern import scalar
from quark.onnx_ops.graph_writer import redirect

MOST = 2.0**20
"""Factors beyond this, or below its inverse, stay: float32 would lose small weights."""
SUMS = 2
"""Sums of constants that a factor passes."""

Change = Callable[[float], None]


def fold_factors(model: ir.Model) -> int:
    """Move every constant factor that can be; return how many were. The last of a chain goes first."""
    count = 0
    for node in reversed(list(model.graph)):
        found = _factor(node)
        if found is None:
            continue
        factor, source = found
        changes = _changes(node.outputs[0], len(dims(source) or ()), SUMS)
        if changes and redirect(node.outputs[0], source):
            for change in changes:
                change(factor)
            prune(node)
            count += 1
    return count


def _factor(node: ir.Node) -> tuple[float, ir.Value] | None:
    """Return the factor of a Mul or Div and the value it multiplies, where its result has the rank of that value."""
    if not is_op(node, "Mul", "Div"):
        return None
    index = 0 if is_op(node, "Mul") and is_constant(node.inputs[0]) else 1
    source, number = node.inputs[1 - index], scalar(node.inputs[index])
    shape = dims(source)
    if source is None or is_constant(source) or shape is None or constant(node.inputs[index]) is None:
        return None
    array = constant(node.inputs[index])
    if array.dtype != np.float32 or array.ndim > len(shape) or not 1 / MOST <= abs(number) <= MOST:
        return None
    return (1 / number if is_op(node, "Div") else number), source


def _changes(value: ir.Value, rank: int, sums: int) -> list[Change]:
    """The changes of constants that make up for a factor of a value; none where a reader of it needs the factor."""
    changes: list[Change] = []
    if value.is_graph_output():
        return changes
    for reader, index in value.uses():
        if reader.graph is not value.graph:
            return []
        if is_op(reader, "Conv", "ConvTranspose") and index == 0:
            weight = reader.inputs[1]
            if not is_constant(weight) or weight is None or not read_once(weight) or not _is_float32(weight):
                return []
            changes.append(partial(_multiply, reader, 1, 1))
        elif is_op(reader, "Add") and sums and _is_added(reader.inputs[1 - index], rank):
            after = _changes(reader.outputs[0], rank, sums - 1)
            if not after:
                return []
            changes += [partial(_multiply, reader, 1 - index, -1), *after]
        else:
            return []
    return changes


def _is_float32(value: ir.Value) -> bool:
    return bool(constant(value).dtype == np.float32)


def _is_added(value: ir.Value | None, rank: int) -> bool:
    """Return True where a value is a float32 constant that gives a sum no more axes."""
    return value is not None and is_constant(value) and _is_float32(value) and constant(value).ndim <= rank


def _multiply(node: ir.Node, index: int, power: int, factor: float) -> None:
    """Multiply a constant input by a power of the factor; other readers of it keep theirs."""
    value = unshared(node, index)
    set_initializer(value, (constant(value).astype(np.float64) * factor**power).astype(np.float32))
