"""choose_nodes: which groups of nodes are computed in integers, so that all kernels and conversions take least time.

    minimise  sum of the groups' times + sum of the conversions between the two sides

A tensor that is written in integers is decoded once, however many nodes read it in float; one that is written in float
is quantized once. This is a minimum cut (`core/solvers/choices/min_cut.py`): its optimum is found, not approached.

One rule of ONNX Runtime is no cut: a float convolution that reads decoded codes, and whose output is quantized and no
more, it computes in integers all the same. Where the cut has one, others follow (the convolution in integers; what
comes before it in float; what comes behind it in float), of which the cheapest goes on: branch and bound.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import inf

from quark.core.solvers.choices.min_cut import MinCut


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


MOST_BRANCHES = 200
"""Cuts of branch and bound; after these the convolutions in question are computed in integers."""


@dataclass(frozen=True)
class Absorbed:
    """A group that is computed in integers wherever its neighbours are.

    Attributes:
        group: The group.
        before: Who writes what it reads.
        behind: Who reads what it writes; nothing else does.
    """

    group: str
    before: str
    behind: frozenset[str]

    def breaks(self, integers: set[str]) -> bool:
        """Whether a choice leaves it in float although it cannot stay there."""
        return self.group not in integers and self.before in integers and self.behind <= integers


@dataclass(frozen=True)
class KernelChoice:
    """What can be chosen, and what it costs.

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
    """The same without the rule that is no cut."""
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


Pins = dict[str, bool]
"""Group -> whether it is computed in integers."""


def choose_nodes(choice: KernelChoice) -> set[str]:
    """The groups to compute in integers."""
    queue: list[tuple[float, int, set[str], Pins]] = []
    pushed = 0
    first = _cut(choice, {})
    heapq.heappush(queue, (_cut_cost(choice, first), pushed, first, {}))
    while queue and pushed < MOST_BRANCHES:
        _, _, chosen, pins = heapq.heappop(queue)
        broken = next((each for each in choice.absorbed if each.breaks(chosen)), None)
        if broken is None:
            return chosen
        for change in (
            {broken.group: True},
            {broken.before: False},
            *({name: False} for name in sorted(broken.behind)),
        ):
            if any(pins.get(name, value) != value for name, value in change.items()):
                continue
            other = _cut(choice, pins | change)
            if all((name in other) == value for name, value in (pins | change).items()):
                pushed += 1
                heapq.heappush(queue, (_cut_cost(choice, other), pushed, other, pins | change))
    return _all_absorbed(choice, first)


def _all_absorbed(choice: KernelChoice, chosen: set[str]) -> set[str]:
    """The cut with every group in integers that would not stay in float."""
    pins: Pins = {}
    while broken := [each.group for each in choice.absorbed if each.breaks(chosen)]:
        pins |= dict.fromkeys(broken, True)
        chosen = _cut(choice, pins)
    return chosen


def _cut(choice: KernelChoice, pins: Pins) -> set[str]:
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
