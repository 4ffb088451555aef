"""placement_choice: what a placement leaves to choose, with the seconds of each group of nodes and each conversion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import read_once
from quark.onnx.graph.model_file import is_constant
from quark.onnx.operators.targets import TARGETS
from quark.onnx.placement.place import writes_float
from quark.onnx.placement.placement import Placement
from quark.onnx.search.latency.choose_nodes import Absorbed, Edge, KernelChoice
from quark.onnx.search.latency.conversions import Line
from quark.onnx.search.latency.node_groups import NodeGroups, Side, group_nodes, tensors

GAIN = 0.05
"""Share of its time in float that a group has to save: the times of one kernel differ by as much from run to run, and
float is the more exact."""


@dataclass(frozen=True)
class PlacementChoice:
    """What can be chosen.

    Attributes:
        choice: The groups, by the node that stands for each.
        groups: Which nodes these are.
        candidates: Names of the nodes that may be computed in integers.
    """

    choice: KernelChoice
    groups: NodeGroups
    candidates: frozenset[str]


def placement_choice(
    model: ir.Model,
    placement: Placement,
    settings: Settings,
    in_float: Side,
    in_integers: Side,
    lines: Mapping[str, Line],
) -> PlacementChoice:
    """The choice between a float model and what a placement makes of it.

    Args:
        model: The float model, that the placement is of.
        placement: All that the target's rule computes in integers.
        settings: The target, and which outputs stay in float.
        in_float, in_integers: How the model runs as it is, and with Q/DQ as the placement says.
        lines: Conversion -> its time by the number of values.
    """
    target = TARGETS[settings.qdq.target]
    names = {node.name or "" for node in placement.nodes}
    writers = {value for node in placement.nodes if not writes_float(node, target, settings) for value in node.outputs}
    groups = group_nodes(model, names, in_float, in_integers)
    for value in writers - set(placement.activations):
        # Nothing is quantized between the two: one is fused into the other.
        reader = next(iter(value.uses())).node if read_once(value) else None
        if reader in placement.nodes:
            groups.join([_name(value.producer()), _name(reader)])
    edges = _Edges(groups, names, writers, in_float, in_integers, lines)
    found = {value: edges.of(value) for value in placement.activations}
    times = [
        {name: sums.get(name, 0.0) for name in sorted(map(groups.find, names))}
        for sums in map(groups.seconds, (in_float, in_integers))
    ]
    needs = frozenset(_needs(groups, [node for node in placement.nodes if node.op_type in target.follows]))
    choice = KernelChoice(
        times[0], times[1], tuple(found.values()), needs, tuple(_absorbed(groups, placement, found)), GAIN
    )
    return PlacementChoice(choice, groups, frozenset(names))


def _needs(groups: NodeGroups, followers: Sequence[ir.Node]) -> Iterator[tuple[str, str]]:
    """(group of a node that computes in integers only behind such, group of one that it reads)."""
    for node in followers:
        for value in node.inputs:
            if value is not None and not is_constant(value):
                one, other = groups.find(node.name), groups.find(_name(value.producer()))
                if one != other:
                    yield one, other


def _absorbed(groups: NodeGroups, placement: Placement, edges: Mapping[ir.Value, Edge]) -> Iterator[Absorbed]:
    """The convolutions that ONNX Runtime, which quantizes a float weight itself, would not leave in float."""
    written = {edge.writer: edge for edge in edges.values() if edge.writer is not None}
    for node in placement.nodes:
        edge = edges.get(node.inputs[0]) if node.inputs[0] is not None else None
        name = groups.find(node.name)
        if node.op_type != "Conv" or edge is None or edge.writer is None or name not in written:
            continue
        behind = written[name]
        if edge.writer != name and behind.readers and not behind.float_reader:
            yield Absorbed(name, edge.writer, behind.readers)


class _Edges:
    """The tensors between groups."""

    def __init__(
        self,
        groups: NodeGroups,
        candidates: set[str],
        writers: set[ir.Value],
        in_float: Side,
        in_integers: Side,
        lines: Mapping[str, Line],
    ) -> None:
        self.groups, self.candidates, self.writers, self.lines = groups, candidates, writers, lines
        self.blocked, self.last = groups.in_other_layout(in_float), groups.in_other_layout(in_integers)
        self.in_float, self.in_integers = in_float, in_integers
        self.sizes = {tensors(kernel)[0]: kernel.elements for kernel in in_float.kernels if kernel.outputs}

    def of(self, value: ir.Value) -> Edge:
        """The edge of a tensor that is quantized."""
        names = {use.node.name or "" for use in value.uses()}
        before = self.groups.find(_name(value.producer())) if value.producer() is not None else None
        readers = {self.groups.find(name) for name in names & self.candidates}
        writer = before if value in self.writers else None
        encode, decode = self._seconds(value, before, readers - {before})
        outside = value.is_graph_output() or bool(names - self.candidates)
        return Edge(writer, frozenset(readers - {writer}), outside, encode, decode)

    def _seconds(self, value: ir.Value, before: str | None, readers: set[str]) -> tuple[float, float]:
        """To quantize a tensor, and to decode it: as it took where it was measured.

        Elsewhere the line of the conversion says it, and that of what brings the tensor into the layout that the other
        side has, where it was left in its own.
        """
        size, name = self._size(value), value.name or ""
        blocked = self.lines["Reorder"](size) if name not in self.in_float.laid_out else 0.0
        last = self.lines["Transpose"](size) if name not in self.in_integers.laid_out else 0.0
        encode = self.in_integers.conversions.get(("QuantizeLinear", name))
        if encode is None:
            encode = self.lines["QuantizeLinear"](size)
            encode += blocked * (before in self.blocked) + last * bool(readers & self.last)
        decode = self.in_integers.conversions.get(("DequantizeLinear", name))
        if decode is None:
            decode = self.lines["DequantizeLinear"](size)
            decode += last * (before in self.last) + blocked * bool(readers & self.blocked)
        return encode, decode

    def _size(self, value: ir.Value) -> int:
        """How many values a tensor has, as it ran; one that no kernel made, by its shape."""
        if value.name in self.sizes:
            return self.sizes[value.name]
        return math.prod(size for size in value.shape or () if isinstance(size, int))


def _name(node: ir.Node | None) -> str:
    return "" if node is None else node.name or ""
