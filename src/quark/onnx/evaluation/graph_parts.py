"""The integer and the float parts of an ONNX graph, in its order, with what repeats said once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from quark.core.array import NumpyArray
from quark.onnx.evaluation.ort_fusion import KINDS, inspect_fusion, kernel_graph
from quark.report.figures import DrawnNode, region_bars
from quark.report.page import PageTable
from quark.report.shown import Shown

__all__ = ["graph_parts"]

REGIONS = ("integer", "float, with quantized nodes", "float")
NAMED = 5
"""Op types of a region that are named."""
LEAST = 4
"""Nodes of what is folded where all of it is of one kind: "Conv x 8, Relu x 8" needs no bracket."""
LONGEST = 4096
"""Nodes of what is folded: beyond that, looking for it takes long."""


@dataclass(frozen=True)
class GraphRegion:
    """Nodes one after the other that all compute in integers, or all in float.

    Attributes:
        is_integer: Whether they compute in integers.
        op_types: Op type -> number of nodes, of one repetition.
        quantized: How many of them are quantized, of one repetition.
        seconds: Of all repetitions; None where times are not known.
    """

    is_integer: bool
    op_types: Mapping[str, int]
    quantized: int
    seconds: float | None = None

    @property
    def kind(self) -> int:
        """Index into `REGIONS`."""
        return 0 if self.is_integer else 1 if self.quantized else 2

    @property
    def nodes(self) -> int:
        """Of one repetition."""
        return sum(self.op_types.values())

    @property
    def runs_as(self) -> str:
        """In words: "float, 3 quantized"."""
        return REGIONS[0] if self.is_integer else f"float{f', {self.quantized} quantized' if self.quantized else ''}"

    def __str__(self) -> str:
        """The op types: "Conv x 12, Add x 3"."""
        most = dict(Counter(self.op_types).most_common(NAMED))
        words = [op if count == 1 else f"{op} x {count}" for op, count in self.op_types.items() if op in most]
        rest = self.nodes - sum(most.values())
        return ", ".join([*words, *([f"{rest} more"] if rest else [])])


@dataclass(frozen=True)
class GraphStretch:
    """Regions one after the other, and how often these repeat."""

    repeats: int
    regions: Sequence[GraphRegion]

    @property
    def marks(self) -> Sequence[str]:
        """A bracket in text, one mark for each region: "/ x 8", "|" and so on; empty marks where nothing repeats."""
        count, words = len(self.regions), f"x {self.repeats}"
        if self.repeats == 1:
            return [""] * count
        return [words] if count == 1 else [f"/ {words}", *["|"] * (count - 2), "\\"]


@dataclass(frozen=True, repr=False)
class GraphParts(Shown):
    """The regions of a graph; prints as a table, in a notebook with a picture.

    Attributes:
        stretches: In the order of the graph.
        of_sizes: Nodes that are left out, as what they give follows from the sizes of tensors and constants alone.
        seconds: Of a run, the conversions between integers and floats included; None where times are not known.
    """

    stretches: Sequence[GraphStretch]
    of_sizes: int = 0
    seconds: float | None = None

    @staticmethod
    def of(
        nodes: Sequence[DrawnNode], times: Mapping[str, float] | None = None, seconds: float | None = None
    ) -> GraphParts:
        """The parts of a graph.

        Args:
            nodes: In order, see `kernel_graph`.
            times: Name of a node -> its seconds; None: not known.
            seconds: Of a run.
        """
        drawn = [node for node in nodes if not node.of_sizes]
        found = [_stretch(drawn[low : low + size * count], size, times) for low, size, count in _folded(drawn)]
        return GraphParts(found, len(nodes) - len(drawn), seconds)

    def drawn(self) -> Sequence[str]:
        """The picture, as SVG; none of a graph without nodes. Raises MissingDependencyError without matplotlib."""
        rows = [
            (stretch.repeats, [(str(each), each.kind, self._length(stretch, each)) for each in stretch.regions])
            for stretch in self.stretches
        ]
        unit = "nodes, those of all repetitions" if self.seconds is None else "share of the time of a run, %"
        return [region_bars(rows, REGIONS, unit)] if rows else []

    def _length(self, stretch: GraphStretch, region: GraphRegion) -> float:
        if not self.seconds or region.seconds is None:
            return float(region.nodes * stretch.repeats)
        return 100 * region.seconds / self.seconds

    def tables(self) -> Sequence[PageTable]:
        """One row for each region."""
        rows = []
        for stretch in self.stretches:
            for mark, region in zip(stretch.marks, stretch.regions, strict=True):
                share = [] if self.seconds is None else [f"{self._length(stretch, region):.1f}%"]
                rows.append((mark, region.runs_as, str(region.nodes), str(region), *share))
        timed = [] if self.seconds is None else ["of the time"]
        title = "Integer and float parts, in the order of the graph"
        return [PageTable(("", "runs as", "nodes", "operators", *timed), rows, title)]


def graph_parts(path: str | os.PathLike[str]) -> GraphParts:
    """Which parts of an ONNX graph ONNX Runtime's CPU provider computes in integers, and which in float.

    Nodes one after the other that all compute in integers, or all in float, are a region, and regions that repeat are
    said once. Nodes of bodies (If, Loop) are part of the node around them.

    Args:
        path: An ONNX file.

    Raises:
        FormatError: It is no ONNX file, or ONNX Runtime does not load it.
    """
    return GraphParts.of(kernel_graph(Path(path), inspect_fusion(path)))


def _stretch(nodes: Sequence[DrawnNode], size: int, times: Mapping[str, float] | None) -> GraphStretch:
    """Nodes that are repetitions of the first ones, of which there are `size`."""
    regions, start = [], 0
    for is_integer, own in groupby(nodes[:size], key=_is_integer):
        members = [*own]
        end = start + len(members)
        seconds = None
        if times is not None:
            seconds = sum(times.get(node.name, 0.0) for at, node in enumerate(nodes) if start <= at % size < end)
        quantized = sum(KINDS[node.kind] != "float" for node in members)
        regions.append(GraphRegion(is_integer, Counter(node.op_type for node in members), quantized, seconds))
        start = end
    return GraphStretch(len(nodes) // size, regions)


def _is_integer(node: DrawnNode) -> bool:
    return KINDS[node.kind] == "integer"


def _folded(nodes: Sequence[DrawnNode]) -> list[tuple[int, int, int]]:
    """Pieces of the nodes, in order: start, nodes of one repetition, repetitions.

    First what saves most by being said once, then the same before and after it.
    """
    kinds = np.array([_is_integer(node) for node in nodes], np.bool_)
    numbers: dict[tuple[int, str], int] = {}
    tokens = np.array([numbers.setdefault((node.kind, node.op_type), len(numbers)) for node in nodes], np.int32)
    todo, found = [(0, len(nodes))], []
    while todo:
        low, high = todo.pop()
        if low == high:
            continue
        start, size, count = _repetition(tokens[low:high], kinds[low:high])
        first, last = low + start, low + start + size * count
        found.append((first, size, count))
        todo += [(low, first), (last, high)]
    return sorted(found)


def _repetition(tokens: NumpyArray, kinds: NumpyArray) -> tuple[int, int, int]:
    """Start, size and count of the repetition that saves most; all tokens once where none is worth it."""
    best, saved = (0, len(tokens), 1), 0
    for size in range(1, min(len(tokens) // 2, LONGEST) + 1):
        if len(tokens) - size <= saved:  # no longer one can save more
            break
        equal = np.concatenate(([False], tokens[size:] == tokens[:-size], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        runs = [(int(low), int(high - low)) for low, high in edges.reshape(-1, 2)[np.diff(edges)[::2] >= size]]
        for start, length in sorted(runs, key=lambda run: -run[1]):
            count = length // size + 1
            if (count - 1) * size <= saved:
                break
            # Of the possible starts the first at which another kind begins.
            places = range(start, start + length % size + 1)
            first = next((place for place in places if place == 0 or kinds[place] != kinds[place - 1]), start)
            if _is_worth_it(tokens[first : first + size], kinds[first : first + size]):
                best, saved = (first, size, count), (count - 1) * size
                break
    return best


def _is_worth_it(tokens: NumpyArray, kinds: NumpyArray) -> bool:
    """Return True where nodes run in several ways, or are enough, and no repetition of fewer than that."""
    if (kinds != kinds[0]).any():
        return True
    small = (size for size in range(1, LEAST) if len(tokens) % size == 0)
    return len(tokens) >= LEAST and all((tokens[size:] != tokens[:-size]).any() for size in small)
