"""The float model in slices that run one after another, so that not all observed tensors are in memory at once.

A run gives all outputs it was asked for at its end: of a model with all its activations as outputs, the whole of them.
Slices are cut where only observed tensors cross, which are outputs in any case: no fusion reaches over one, so that
the slices compute what the whole does, each node once and bit for bit. The runtime computes some operators in another
order of sums where the tensor that they read comes in blocks of channels, straight from a convolution: not cut there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime

from quark.core.array import NumpyArray
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.graph.edit import reads_of
from quark.onnx.graph.model_file import split_weights
from quark.onnx.graph.sessions import ask_for, failing_on

SLICE_BYTES = 1 << 24
"""Of the observed tensors of a slice: enough that what a run costs by itself is little beside it."""
MOST_SLICES = 16
"""Each has a session, with threads of its own."""
_KEPT_BYTES = 1 << 27
"""Of the observed tensors of a sample: up to here the sessions keep the memory of a run for the next, which otherwise
is given back, and cleared page by page when it is taken again: a tenth of the time of ResNet-50.
"""

BLOCKED = ("BatchNormalization", "AveragePool", "GlobalAveragePool", "Resize", "Upsample")
"""Operators whose rounding depends on whether they read blocks of channels."""
_PASSED_ON = (
    *("Add", "Sum", "Mul", "Concat", "Clip", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish"),
    *("Gelu", "MaxPool", *BLOCKED),
)
"""Operators that give blocks of channels where they read them."""

OpenSession = Callable[[onnx.ModelProto, dict[str, Any], bool], onnxruntime.InferenceSession]
"""Of a model of `split_weights`, its weights, and whether memory that a run leaves may be kept for the next."""


@dataclass
class Slice:
    """Consecutive nodes.

    Attributes:
        session: Of them.
        reads: What they read of the inputs of the model, and of the slices before.
        gives: The observed tensors.
        last: The observed tensors that no later slice reads.
    """

    session: onnxruntime.InferenceSession
    reads: list[str]
    gives: list[str]
    last: list[str]


class SlicedSession:
    """Sessions on the slices of a model.

    Args:
        model: The float model, not changed.
        wanted: Names of the observed tensors; none is an input.
        feed: A sample: how large the tensors are follows from it.
        open_session: How a slice is run.
    """

    def __init__(self, model: ir.Model, wanted: Sequence[str], feed: Feed, open_session: OpenSession) -> None:
        proto, weights = split_weights(model)
        sizes = tensor_bytes(proto, wanted, feed)
        parts = cut_proto(proto, model, cut(model, sizes))
        keeps = len(parts) == 1 or sum(sizes.values()) <= _KEPT_BYTES
        later = set[str]()
        self.slices: list[Slice] = []
        for part in reversed(parts):
            made = {name for node in part.graph.node for name in node.output}
            gives = [name for name in wanted if name in made or len(parts) == 1]
            ask_for(part, gives)
            names = {tensor.name for tensor in part.graph.initializer}
            own = {name: array for name, array in weights.items() if name in names}
            session = open_session(part, own, keeps)
            reads = [entry.name for entry in session.get_inputs()]
            self.slices.insert(0, Slice(session, reads, gives, [x for x in (*gives, *reads) if x not in later]))
            later.update(reads)

    def run(self, feed: Feed) -> Iterator[dict[str, NumpyArray]]:
        """The observed tensors of one sample, slice by slice; a slice runs when it is asked for.

        Raises:
            CalibrationError: The model fails on the sample.
        """
        values: dict[str, Any] = dict(feed)
        for part in self.slices:
            with failing_on(feed):
                # The runtime says itself what lacks, or is too much.
                given = values if len(self.slices) == 1 else {name: values[name] for name in part.reads}
                # Asked for nothing, it would give its outputs.
                made = dict(zip(part.gives, part.session.run(part.gives, given), strict=True)) if part.gives else {}
            values |= made
            for name in part.last:
                values.pop(name, None)
            del given
            yield made


def tensor_bytes(proto: onnx.ModelProto, names: Sequence[str], feed: Feed) -> dict[str, int]:
    """Bytes of tensors for one sample; one that inference does not know counts as the largest of the others.

    Args:
        proto: A model of `split_weights`, not changed.
        names: The tensors.
        feed: The sample.
    """
    fixed = onnx.ModelProto()
    fixed.CopyFrom(proto)
    for entry in fixed.graph.input:
        if entry.name in feed:
            del entry.type.tensor_type.shape.dim[:]
            for size in feed[entry.name].shape:
                entry.type.tensor_type.shape.dim.add(dim_value=size)
    del fixed.graph.value_info[:]
    for output in fixed.graph.output:
        output.type.tensor_type.ClearField("shape")
    with suppress(Exception):  # whatever it says of shapes that contradict each other; all sizes are unknown then
        fixed = onnx.shape_inference.infer_shapes(fixed, data_prop=True)
    sizes = {}
    for value in (*fixed.graph.value_info, *fixed.graph.output):
        tensor = value.type.tensor_type
        if (
            tensor.elem_type
            and tensor.HasField("shape")
            and all(size.HasField("dim_value") for size in tensor.shape.dim)
        ):
            kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            sizes[value.name] = math.prod(size.dim_value for size in tensor.shape.dim) * kind.itemsize
    most = max((sizes.get(name, 0) for name in names), default=0)
    return {name: sizes.get(name, most) for name in names}


def cut(model: ir.Model, sizes: Mapping[str, int], limit: int | None = None) -> list[tuple[int, int]]:
    """Where the nodes of a model are cut: the start and the stop of each slice.

    Args:
        model: The model, its nodes in order.
        sizes: The tensors that may cross, with their bytes.
        limit: Most bytes of these that a slice makes, where they allow it; None for what memory bears.
    """
    nodes = list(model.graph)
    limit = limit or max(SLICE_BYTES, sum(sizes.values()) // MOST_SLICES)
    last_read = _last_reads(nodes, _crossing(nodes, sizes))
    hidden: set[ir.Value] = set()
    parts, start, possible, size, since = [], 0, 0, 0, 0
    for position, node in enumerate(nodes):
        made = sum(sizes.get(value.name or "", 0) for value in node.outputs)
        if possible > start and size + made > limit:
            parts.append((start, possible))
            start, size = possible, since
        size, since = size + made, since + made
        hidden |= {value for value in node.outputs if value in last_read}
        hidden -= {value for value in reads_of(node) if last_read.get(value) == position}
        if not hidden:
            possible, since = position + 1, 0
    return [*parts, (start, len(nodes))]


def _crossing(nodes: Sequence[ir.Node], sizes: Mapping[str, int]) -> set[ir.Value]:
    """The tensors that may cross, but for what the runtime computes once: what reads that finds a constant."""
    crossing, constants = set[ir.Value](), set[ir.Value]()
    for node in nodes:
        if all(_is_fixed(value) or value in constants for value in reads_of(node)):
            constants.update(node.outputs)
        else:
            crossing.update(value for value in node.outputs if value.name in sizes and value.dtype is not None)
    return crossing


def _last_reads(nodes: Sequence[ir.Node], crossing: Set[ir.Value]) -> dict[ir.Value, int]:
    """Until where a tensor may not be cut off from what reads it: the last node that reads it."""
    last_read: dict[ir.Value, int] = {}
    for position, node in reversed(list(enumerate(nodes))):
        passed_on = node.op_type in _PASSED_ON and any(value in last_read for value in node.outputs)
        tied = passed_on or _rounds_by_layout(node, crossing)
        for value in reads_of(node):
            if tied or value not in crossing:
                last_read.setdefault(value, position)
    return last_read


def _rounds_by_layout(node: ir.Node, observed: Set[ir.Value]) -> bool:
    """Return True where a rounding in a node's output depends on whether its inputs come in blocks of channels."""
    if node.op_type in ("Add", "Sum"):
        # The convolution that gives one term, which nothing else reads, may begin its sums with the other.
        return any(value is not None and value not in observed and value.producer() for value in node.inputs)
    nearest = node.op_type == "Resize" and node.attributes.get_string("mode", "nearest") == "nearest"
    return node.op_type in BLOCKED and not nearest


def _is_fixed(value: ir.Value) -> bool:
    """Return True where a value is an initializer that no run may overrule."""
    return value.const_value is not None and value.producer() is None and not value.is_graph_input()


def cut_proto(proto: onnx.ModelProto, model: ir.Model, ranges: Sequence[tuple[int, int]]) -> list[onnx.ModelProto]:
    """The nodes of each range as a model of its own, which reads and gives what they do."""
    nodes = list(model.graph)
    return [_part(proto, nodes, start, stop) for start, stop in ranges] if len(ranges) > 1 else [proto]


def _part(proto: onnx.ModelProto, nodes: Sequence[ir.Node], start: int, stop: int) -> onnx.ModelProto:
    part = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions)
    part.graph.name = proto.graph.name
    part.graph.node.extend(proto.graph.node[start:stop])
    made = {name for node in part.graph.node for name in node.output}
    read = dict.fromkeys(value for node in nodes[start:stop] for value in reads_of(node) if value.name not in made)
    names = {value.name for value in read}
    part.graph.initializer.extend(tensor for tensor in proto.graph.initializer if tensor.name in names)
    part.graph.input.extend(ir.to_proto(value) for value in read if not _is_fixed(value))
    part.graph.value_info.extend(value for value in proto.graph.value_info if value.name in made)
    part.graph.output.extend(output for output in proto.graph.output if output.name in made)
    return part
