"""choose_nodes: which groups of nodes are computed in integers, so that all kernels and conversions take least time.

    minimise  sum of the groups' times + sum of the conversions between the two sides

A tensor that is written in integers is decoded once, however many nodes read it in float; one that is written in float
is quantized once. This is a minimum cut (`core/solvers/choices/min_cut.py`): its optimum is found, not approached.

One rule of ONNX Runtime is no cut: a float convolution that reads decoded codes, and whose output is quantized and no
more, it computes in integers all the same. Where the cut has one, others follow (the convolution in integers; what
comes before it in float; what comes after it in float), of which the cheapest goes on: branch and bound.

What a placement leaves to choose, with the seconds of each group of nodes and each conversion, is a `PlacementChoice`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import onnx_ir as ir

from quark.core.solvers.choices.min_cut import MinCut
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import read_once
from quark.onnx.graph.model_file import live_inputs
from quark.onnx.operators.targets import TARGETS
from quark.onnx.placement.place import writes_float
from quark.onnx.placement.placement import Placement
from quark.onnx.search.latency.node_groups import NodeGroups, Side, group_nodes, tensors
from quark.onnx.search.latency.profile_file import Line


@dataclass(frozen=True)
class Edge:
    """A tensor between groups.

    Attributes:
        writer: The group that may write it in integers; None where it comes in float in any case.
        readers: The groups that may read it in integers.
        float_reader: Whether something reads it in float in any case.
        encode: Seconds to quantize it.
        decode: Seconds to decode it.
    """

    writer: str | None
    readers: frozenset[str]
    float_reader: bool
    encode: float
    decode: float


_MOST_BRANCHES = 200
"""Cuts of branch and bound; after these the convolutions in question are computed in integers."""


@dataclass(frozen=True)
class Absorbed:
    """A group that is computed in integers wherever its neighbours are.

    Attributes:
        group: The group.
        before: Who writes what it reads.
        after: Who reads what it writes; nothing else does.
    """

    group: str
    before: str
    after: frozenset[str]

    def breaks(self, integers: set[str]) -> bool:
        """Return True where a choice leaves it in float although it cannot stay there."""
        return self.group not in integers and self.before in integers and self.after <= integers


@dataclass(frozen=True)
class KernelChoice:
    """The groups of nodes to choose from, and what they cost.

    Attributes:
        in_float: Group -> seconds in float.
        in_integers: The same in integers; both have an entry for each group that may be either.
        edges: The tensors between groups.
        needs: (group, group that has to be computed in integers where the first one is).
        absorbed: Groups that do not stay in float among integers.
        gain: Share of its time in float that integers have to save; what is as fast in float stays in float, which is
            the more exact.
    """

    in_float: dict[str, float]
    in_integers: dict[str, float]
    edges: tuple[Edge, ...]
    needs: frozenset[tuple[str, str]] = frozenset()
    absorbed: tuple[Absorbed, ...] = ()
    gain: float = 0.0


def cost(choice: KernelChoice, integers: set[str]) -> float:
    """Seconds of all groups and conversions, if some groups are computed in integers; infinite where that cannot be."""
    broken = any(each.breaks(integers) for each in choice.absorbed)
    return inf if broken else _cut_cost(choice, integers)


def _cut_cost(choice: KernelChoice, integers: set[str]) -> float:
    """Seconds of a cut: all groups and conversions; infinite where a group needs another in integers."""
    if any(first in integers and second not in integers for first, second in choice.needs):
        return inf
    total = sum(
        choice.in_integers[name] if name in integers else choice.in_float[name] * (1 - choice.gain)
        for name in choice.in_float
    )
    for edge in choice.edges:
        if edge.writer in integers:
            total += edge.decode if edge.float_reader or edge.readers - integers else 0.0
        elif edge.readers & integers:
            total += edge.encode
    return total


_Pins = dict[str, bool]
"""Group -> whether it is computed in integers."""


def choose_nodes(choice: KernelChoice) -> set[str]:
    """The groups to compute in integers."""
    queue: list[tuple[float, int, set[str], _Pins]] = []
    pushed = 0
    first = _cut(choice, {})
    heapq.heappush(queue, (_cut_cost(choice, first), pushed, first, {}))
    while queue and pushed < _MOST_BRANCHES:
        _, _, chosen, pins = heapq.heappop(queue)
        broken = next((each for each in choice.absorbed if each.breaks(chosen)), None)
        if broken is None:
            return chosen
        for change in ({broken.group: True}, {broken.before: False}, *({name: False} for name in sorted(broken.after))):
            if any(pins.get(name, value) != value for name, value in change.items()):
                continue
            other = _cut(choice, pins | change)
            if all((name in other) == value for name, value in (pins | change).items()):
                pushed += 1
                heapq.heappush(queue, (_cut_cost(choice, other), pushed, other, pins | change))
    # No branch did without one: each group that would not stay in float is computed in integers.
    chosen, pins = first, {}
    while absorbed := [each.group for each in choice.absorbed if each.breaks(chosen)]:
        pins |= dict.fromkeys(absorbed, True)
        chosen = _cut(choice, pins)
    return chosen


def _cut(choice: KernelChoice, pins: _Pins) -> set[str]:
    """The groups in integers of the least cut, of several the smallest; pins hold where they can."""
    cut: MinCut[str | tuple[str, int]] = MinCut()
    for name, seconds in choice.in_float.items():
        cut.side_cost(name, choice.in_integers[name], seconds * (1 - choice.gain))
    for one, other in choice.needs:
        cut.parting_cost(one, other)
    for number, edge in enumerate(choice.edges):
        _add_edge(cut, number, edge)
    # More than all else together, and finite: an infinite flow would have no end.
    most = 1.0 + sum(choice.in_float.values()) + sum(choice.in_integers.values())
    most += sum(edge.encode + edge.decode for edge in choice.edges)
    for name, integers in pins.items():
        cut.side_cost(name, 0.0 if integers else most, most if integers else 0.0)
    return {item for item in cut.solve() if isinstance(item, str)}


def _add_edge(cut: MinCut[str | tuple[str, int]], number: int, edge: Edge) -> None:
    """Two more items stand for a tensor: its decoded form, outside where one reads it, and its codes, in S likewise."""
    decoded, codes = ("decoded", number), ("codes", number)
    if edge.writer is not None:
        readers = edge.readers - {edge.writer}
        if edge.float_reader:
            cut.side_cost(edge.writer, edge.decode, 0.0)
        elif readers:
            cut.parting_cost(edge.writer, decoded, edge.decode)
            for reader in readers:
                cut.parting_cost(decoded, reader)
        if readers:
            cut.parting_cost(codes, edge.writer, edge.encode)
            for reader in readers:
                cut.parting_cost(reader, codes)
    elif edge.readers:
        cut.side_cost(codes, edge.encode, 0.0)
        for reader in edge.readers:
            cut.parting_cost(reader, codes)


# What there is to choose ---------------------------------------------------------------------------------------------


GAIN = 0.05
"""Share of its time in float that a group has to save: the times of one kernel differ by as much from run to run, and
float is the more exact."""


@dataclass(frozen=True)
class PlacementChoice:
    """The nodes of a placement as groups to choose from.

    Attributes:
        choice: The groups, by the node that stands for each.
        groups: Which nodes these are.
        candidates: Names of the nodes that may be computed in integers.
        float_seconds: Of all kernels of the float model.
    """

    choice: KernelChoice
    groups: NodeGroups
    candidates: frozenset[str]
    float_seconds: float


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
    return PlacementChoice(choice, groups, frozenset(names), in_float.total())


def _needs(groups: NodeGroups, followers: Sequence[ir.Node]) -> Iterator[tuple[str, str]]:
    """(group of a node that computes in integers only after such, group of one that it reads)."""
    for node in followers:
        for value in live_inputs(node):
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
        after = written[name]
        if edge.writer != name and after.readers and not after.float_reader:
            yield Absorbed(name, edge.writer, after.readers)


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
        name = value.name or ""
        # A tensor that no kernel made has the size of its shape.
        shape = [size for size in value.shape or () if isinstance(size, int)]
        size = self.sizes[name] if name in self.sizes else math.prod(shape)
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


def _name(node: ir.Node | None) -> str:
    return "" if node is None else node.name or ""
