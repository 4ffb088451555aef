"""output_parts: the parts of a model's outputs that were different tensors until a Concat joined them.

    boxes (n, 4, 8400) --+
                         Concat, axis 1 --> Transpose --> output (n, 8400, 84)      parts: [..., :4] and [..., 4:]
    scores (n, 80, 8400) +

One figure over both would be that of the boxes, whose values are hundreds of times as large. Nodes that only move data
are followed back to the Concat, with the axis along which it joins. Neighbours that lie between 0 and 1 by their
operators (Sigmoid, Softmax) are one part: they are the same quantity of several maps or classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.onnx.graph.edit import axes_of, dims, is_op
from quark.onnx.graph.model_file import constant, infer_shapes, is_constant

BOUNDED = ("Sigmoid", "Softmax", "HardSigmoid")
"""Op types whose values lie from 0 to 1."""
SILENT = 0.05
"""A part from 0 to 1 that stays below it on all samples holds no event; a quantized model may give twice as much."""
KEPT = ("Identity", "Cast", "Relu", "Clip", "Dropout")
"""Op types that leave every value where it is, and from 0 to 1 where it lies there."""
SCALES = ("Mul", "Div", "Add", "Sub")
"""Op types that leave every value where it is, where their other operand is a constant."""


@dataclass(frozen=True)
class OutputPart:
    """A part of a tensor.

    Attributes:
        tensor: The name of the tensor.
        axis: Along which it is a part; None where it is all of the tensor.
        start, stop: From which index, and before which one; counted from the end where below 0, None for the end.
        bounded: Whether its operators keep its values from 0 to 1.
    """

    tensor: str
    axis: int | None = None
    start: int = 0
    stop: int | None = None
    bounded: bool = False

    def of(self, array: NumpyArray) -> NumpyArray:
        """Its values, a view of those of the tensor."""
        return array if self.axis is None else array[(slice(None),) * self.axis + (slice(self.start, self.stop),)]

    def __str__(self) -> str:
        if self.axis is None:
            return self.tensor
        stop = "" if self.stop is None else str(self.stop)
        return f"{self.tensor}[{':, ' * self.axis}{self.start or ''}:{stop}]"


def output_parts(model: ir.Model) -> dict[str, tuple[OutputPart, ...]]:
    """Name of an output -> its parts, one or more, in their order.

    Args:
        model: A float model; not changed. Shapes that it does not declare are inferred.
    """
    outputs = list(model.graph.outputs)
    if any(_has_concat(value) for value in outputs):
        # A copy shares the weights.
        copied = model.clone()
        infer_shapes(copied)
        outputs = list(copied.graph.outputs)
    return {value.name or "": tuple(_parts_of(value)) for value in outputs}


def compared_parts(model: ir.Model) -> list[OutputPart]:
    """The parts of the outputs by which models are compared: floats, truth values, and indices of an ArgMax."""
    kinds = {value.name: value for value in model.graph.outputs}
    return [part for name, parts in output_parts(model).items() if _is_compared(kinds[name]) for part in parts]


def _is_compared(value: ir.Value) -> bool:
    if value.dtype is None or value.dtype.is_floating_point() or value.dtype is ir.DataType.BOOL:
        return True
    node, source = value.producer(), _source(value.producer())
    while source is not None:
        node, source = source.producer(), _source(source.producer())
    return is_op(node, "ArgMax", "ArgMin", "Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal")


def parts_of(names: Iterable[str], parts: dict[str, tuple[OutputPart, ...]]) -> list[OutputPart]:
    """The parts of some outputs."""
    return [part for name in names for part in parts.get(name, (OutputPart(name),))]


def _has_concat(value: ir.Value) -> bool:
    node, source = value.producer(), _source(value.producer())
    while source is not None and not is_op(node, "Concat"):
        node, source = source.producer(), _source(source.producer())
    return is_op(node, "Concat")


def _source(node: ir.Node | None) -> ir.Value | None:
    """The tensor whose values a node moves, or scales by constants; None where it does something else."""
    if node is None or not node.inputs:
        return None
    if is_op(node, *KEPT, "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze"):
        return node.inputs[0]
    live = [x for x in node.inputs if not is_constant(x)]
    scales = is_op(node, *SCALES) and len(live) == 1 and live[0] is not None
    same_rank = scales and (shape := dims(live[0])) is not None and len(shape) == len(dims(node.outputs[0]) or ())
    return live[0] if same_rank else None


def _parts_of(value: ir.Value) -> list[OutputPart]:
    """The parts of a tensor; one where nothing joins it, or it is not known along which axis."""
    node, whole = value.producer(), [OutputPart(value.name or "", bounded=_bounded(value))]
    if node is not None and is_op(node, "Concat"):
        found = _joined(value, node)
    elif node is not None and (source := _source(node)) is not None:
        found = [_moved(part, node) for part in _parts_of(source)]
    else:
        return whole
    if len(found) < 2 or any(part is None for part in found):
        return whole
    return [replace(part, tensor=value.name or "") for part in found if part is not None]


def _joined(value: ir.Value, node: ir.Node) -> list[OutputPart | None]:
    """Return what a Concat joins; where all of that has the same parts along another axis, these parts."""
    axis = _axis_of(value, node)
    if axis is None:
        return []
    inner = [[replace(part, tensor="") for part in _parts_of(x)] for x in node.inputs if x is not None]
    if len(inner[0]) > 1 and inner[0][0].axis != axis and all(parts == inner[0] for parts in inner):
        return list(inner[0])
    sizes = _sizes(node, axis)
    if sizes.count(None) > 1:
        return []
    found: list[OutputPart] = []
    for parts, size, (start, stop) in zip(inner, sizes, _bounds(sizes), strict=True):
        if parts[0].axis == axis and size is not None:
            # One Concat of another along one axis is one of all.
            found += [_shifted(part, start, stop, size) for part in parts]
        else:
            found.append(OutputPart("", axis, start, stop, all(part.bounded for part in parts)))
    return list(_merged(found))


def _axis_of(value: ir.Value, concat: ir.Node) -> int | None:
    """Along which axis a Concat joins; None where it counts from the end and the number of axes is not known."""
    axis = concat.attributes.get_int("axis", 0)
    rank = next((len(x.shape) for x in (value, *concat.inputs) if x is not None and x.shape is not None), None)
    if rank:
        return axis % rank
    return axis if axis >= 0 else None


def _sizes(concat: ir.Node, axis: int) -> list[int | None]:
    return [None if (shape := dims(x)) is None else shape[axis] for x in concat.inputs]


def _bounds(sizes: list[int | None]) -> Iterator[tuple[int, int | None]]:
    """From where to where each of several parts lies: after one of unknown size, counted from the end."""
    for index, size in enumerate(sizes):
        before, later = sizes[:index], sizes[index + 1 :]
        start = -_total(sizes[index:]) if None in before else _total(before)
        stop = -_total(later) if size is None else start + size
        yield start, stop if later else None


def _total(sizes: list[int | None]) -> int:
    return sum(size for size in sizes if size is not None)


def _shifted(part: OutputPart, start: int, stop: int | None, size: int) -> OutputPart:
    """A part of a tensor that begins at `start` in another."""
    first = part.start if part.start >= 0 else size + part.start
    last = size if part.stop is None else part.stop if part.stop > 0 else size + part.stop
    return replace(part, start=start + first, stop=stop if last == size else start + last)


def _merged(parts: list[OutputPart]) -> list[OutputPart]:
    """The parts, of neighbours from 0 to 1 one."""
    found: list[OutputPart] = []
    for part in parts:
        if found and found[-1].bounded and part.bounded:
            found[-1] = replace(found[-1], stop=part.stop)
        else:
            found.append(part)
    return found


def _moved(part: OutputPart, node: ir.Node) -> OutputPart | None:
    """The part of what a node gives that holds a part of what it reads; None where there is none, or none is known."""
    if part.axis is None:
        return None
    if is_op(node, *KEPT, *SCALES):
        return part if is_op(node, *KEPT) else replace(part, bounded=False)
    axis = _axis_after(part.axis, node)
    return None if axis is None else replace(part, axis=axis)


def _axis_after(axis: int, node: ir.Node) -> int | None:
    """The axis of an output that an axis of the input became."""
    before, after = dims(node.inputs[0]), dims(node.outputs[0])
    if is_op(node, "Transpose"):
        order = node.attributes.get_ints("perm", ()) or tuple(reversed(range(len(before or ()))))
        return list(order).index(axis) if axis in order else None
    if is_op(node, "Unsqueeze", "Squeeze"):
        return _beside_ones(axis, node, before, after)
    if before is None or after is None:
        return None
    return _reshaped(axis, before, after)


def _beside_ones(
    axis: int, node: ir.Node, before: list[int | None] | None, after: list[int | None] | None
) -> int | None:
    ones, rank = axes_of(node), len((before if is_op(node, "Squeeze") else after) or ())
    if ones is None or not rank:
        return None
    added = {one % rank for one in ones}
    if is_op(node, "Squeeze"):
        return None if axis in added else axis - sum(one < axis for one in added)
    return [index for index in range(rank) if index not in added][axis]


def _reshaped(axis: int, before: list[int | None], after: list[int | None]) -> int | None:
    """The axis that a Reshape or Flatten leaves as long, with as many values after it, or before it; None for none."""
    size = before[axis]
    if size is None:
        return None
    for inner in (True, False):
        beside = _count(before[axis + 1 :] if inner else before[:axis])
        for index, other in enumerate(after):
            if (
                other == size
                and beside is not None
                and _count(after[index + 1 :] if inner else after[:index]) == beside
            ):
                return index
    return None


def _count(sizes: list[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


def _bounded(value: ir.Value) -> bool:
    """Return True where the values of a tensor lie from 0 to 1."""
    node = value.producer()
    while not is_op(node, "Clip", *SCALES) and (source := _source(node)) is not None:
        node = source.producer()
    if is_op(node, "Clip") and node is not None and len(node.inputs) == 3:
        return constant(node.inputs[1]) == 0 and constant(node.inputs[2]) == 1
    return is_op(node, *BOUNDED)
