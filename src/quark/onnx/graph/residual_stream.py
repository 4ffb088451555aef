"""The residual streams of a graph: the tensors that Adds carry from block to block, and every constant that meets them.

A stream is found from a norm that reads it: forwards through all that reads, backwards through all that writes. It can
be rotated if its writers are linear layers, embeddings and constants, and its readers linear layers and norms that
linear layers alone read. What moves values and leaves the last axis alone may stand anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from quark.errors import StructureError
from quark.onnx.graph.channels import ChannelConstant, is_linear, output_constants, weight_by_input
from quark.onnx.graph.edit import dims, is_op
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.graph.norms import Normalization, find_norms
from quark.onnx.graph.pattern import scalar

_RESHAPES = ("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand")
"""They leave the last axis alone if it is as long afterwards."""


@dataclass
class ResidualStream:
    """One stream, as the constants that a rotation of it changes.

    Attributes:
        width: Length of its last axis.
        turned: Constants of those that write it, and of those that read it without a norm.
        norms: The norms that read it, each with the weights of the linear layers after.
    """

    width: int
    turned: dict[ChannelConstant, None] = field(default_factory=dict)
    norms: dict[Normalization, tuple[ChannelConstant, ...]] = field(default_factory=dict)

    @property
    def centred(self) -> bool:
        """True where a norm subtracts the mean, which a rotation then must keep."""
        return any(norm.centred for norm in self.norms)

    @property
    def constants(self) -> list[ChannelConstant]:
        """Every constant that a rotation changes, but for gains and biases of norms."""
        return [*self.turned, *dict.fromkeys(weight for weights in self.norms.values() for weight in weights)]


def find_streams(graph: ir.Graph) -> tuple[list[ResidualStream], list[str]]:
    """The streams that can be rotated, and why others cannot."""
    norms, streams, reasons = find_norms(graph), [], []
    seen: set[Normalization] = set()
    for norm in norms:
        if norm in seen:
            continue
        walk = _Walk(graph, norms)
        try:
            streams.append(walk.run(norm))
        except StructureError as error:
            reasons.append(str(error))
        seen.update(walk.met)
    return streams, list(dict.fromkeys(reasons))


class _Walk:
    """Finds one stream."""

    def __init__(self, graph: ir.Graph, norms: list[Normalization]) -> None:
        self.graph = graph
        self.readers = {node: norm for norm in norms for node in norm.nodes}
        self.writers = {norm.total: norm for norm in norms if norm.total is not None}
        self.met: dict[Normalization, None] = {}
        self.seen: set[ir.Value] = set()
        self.todo: list[ir.Value] = []

    def run(self, start: Normalization) -> ResidualStream:
        """The stream that a norm reads. Raises StructureError where it cannot be rotated."""
        self.met[start] = None
        width = (dims(start.sources[0]) or [None])[-1] or (start.gain.size if start.gain else None)
        if width is None:
            raise StructureError(f"How wide {start.sources[0].name} is, is not known.")
        self.stream = ResidualStream(width)
        self._visit(*start.sources)
        while self.todo:
            value = self.todo.pop()
            if value.is_graph_input() or value.is_graph_output():
                raise StructureError(f"{value.name} is an input or output of the model.")
            self._follow_to_writer(value)
            for use in value.uses():
                self._follow_to_reader(value, use.node, use.idx)
        return self.stream

    def _visit(self, *values: ir.Value | None) -> None:
        for value in values:
            if value is None or value in self.seen:
                continue
            width = (dims(value) or [None])[-1]
            if width not in (None, self.stream.width):
                raise StructureError(f"{value.name} is {width} wide, the residual stream {self.stream.width}.")
            self.seen.add(value)
            self.todo.append(value)

    def _turn(self, *constants: ChannelConstant) -> None:
        """Note constants of the stream. Raises StructureError for one of another width."""
        for part in constants:
            if not is_constant(part.value) or part.size not in (1, self.stream.width):
                raise StructureError(f"{part.value.name} of {_name(part.node)} is not of the stream.")
        self.stream.turned |= dict.fromkeys(constants)

    def _follow_to_writer(self, value: ir.Value) -> None:
        """Follow a value back to what writes it."""
        node = value.producer()
        if node is None:
            raise StructureError(f"{value.name} has no producer.")
        norm = self.writers.get(value)
        if norm is not None:
            self._meet(norm)
        elif is_linear(node):
            self._turn(*output_constants(node))
        elif is_op(node, "Gather") and is_constant(node.inputs[0]) and _moves(node):
            self._turn(ChannelConstant(node, 0))
        elif not self._passes(node):
            raise StructureError(f"{_name(node)} writes to the residual stream.")

    def _follow_to_reader(self, value: ir.Value, node: ir.Node, index: int) -> None:
        """Follow a value to one of its readers."""
        norm = self.readers.get(node)
        if norm is not None and value in norm.sources:
            self._meet(norm)
        elif is_linear(node) and index == 0:
            self._turn(weight_by_input(node))
        elif node.graph is not self.graph or not self._passes(node):
            raise StructureError(f"{_name(node)} reads the residual stream.")

    def _passes(self, node: ir.Node) -> bool:
        """Take in what a node that adds, moves or scales as a whole reads and writes; False for any other."""
        operands = _operands(node)
        for index in operands:
            if is_constant(node.inputs[index]):
                self._turn(ChannelConstant(node, index))
            else:
                self._visit(node.inputs[index])
        self._visit(*(node.outputs if operands else ()))
        return bool(operands)

    def _meet(self, norm: Normalization) -> None:
        """Take in a norm: what it adds up, its sum, and the linear layers after it."""
        if norm in self.stream.norms:
            return
        self.met[norm] = None
        self.stream.norms[norm] = ()
        if norm.added is not None:
            self._turn(norm.added)
        self._visit(*norm.sources, norm.total)
        self.stream.norms[norm] = tuple(self._weights_after(norm.output))

    def _weights_after(self, start: ir.Value) -> list[ChannelConstant]:
        """The weights of the linear layers that read what a norm gives, through what moves it."""
        weights, todo = [], [start]
        while todo:
            value = todo.pop()
            if value.is_graph_output():
                raise StructureError(f"{value.name}, which a norm gives, is an output of the model.")
            for use in value.uses():
                if is_linear(use.node) and use.idx == 0:
                    weights.append(weight_by_input(use.node))
                elif use.node.graph is self.graph and use.idx == 0 and _moves(use.node):
                    todo += use.node.outputs
                else:
                    raise StructureError(f"{_name(use.node)} reads what a norm of the residual stream gives.")
        return weights


def _operands(node: ir.Node) -> list[int]:
    """Which inputs of a node belong to the stream of its output; none where it does more than add, move or scale."""
    if is_op(node, "Add", "Sub") or (is_op(node, "Concat") and _spares_last(node, node.attributes["axis"].as_int())):
        return list(range(len(node.inputs)))
    if is_op(node, "Mul", "Div") and not math.isnan(scalar(node.inputs[1])):
        return [0]
    if is_op(node, "Mul") and not math.isnan(scalar(node.inputs[0])):
        return [1]
    return [0] if _moves(node) else []


def _moves(node: ir.Node) -> bool:
    """Return True where a node moves values of its first input, and leaves the last axis as it is."""
    if is_op(node, *_RESHAPES):
        before, after = dims(node.inputs[0]), dims(node.outputs[0])
        return is_op(node, "Identity") or bool(before and after and before[-1] and before[-1] == after[-1])
    if is_op(node, "Transpose"):
        perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else ()
        return bool(perm) and perm[-1] == len(perm) - 1
    if is_op(node, "Gather", "Split"):
        return _spares_last(node, node.attributes.get_int("axis", 0))
    if is_op(node, "Slice"):
        axes = constant(node.inputs[3]) if len(node.inputs) > 3 else None
        return axes is not None and _spares_last(node, *np.ravel(axes).tolist())
    return False


def _spares_last(node: ir.Node, *axes: int) -> bool:
    """Return True where none of these axes is the last one of the first input."""
    shape = dims(node.inputs[0])
    return shape is not None and all(axis % len(shape) != len(shape) - 1 for axis in axes)


def _name(node: ir.Node) -> str:
    return f"{node.name} ({node.op_type})"
