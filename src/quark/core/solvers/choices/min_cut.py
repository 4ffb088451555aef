"""Minimum s-t cut: which side each item takes, where sides cost something and so does parting from a neighbour.

    minimise  sum_i (first_i if i in S else second_i)  +  sum_(i,j) c_ij [i in S, j not in S],   c_ij >= 0

By the theorem of Ford and Fulkerson (1956) the least cut is as large as the greatest flow from the source, on whose
side S is, to the sink. The flow is found along shortest paths (Edmonds and Karp 1972), so that it ends for real
capacities too: at most V E / 2 of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from math import inf
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class MinCut(Generic[Item]):
    """A graph that is built edge by edge, then cut."""

    def __init__(self) -> None:
        self._index: dict[Item, int] = {}
        # The source is 0 and the sink 1; capacities[i][j] is what still fits from i to j.
        self._capacities: list[dict[int, float]] = [{}, {}]

    def side_cost(self, item: Item, first: float, second: float) -> None:
        """Add the costs of an item in S and outside to those that were given before.

        Only the difference matters to the cut, so that a cost may be below zero.
        """
        difference = second - first
        vertex = self._vertex(item)
        if difference > 0:
            self._add(0, vertex, difference)
        else:
            self._add(vertex, 1, -difference)

    def parting_cost(self, item: Item, other: Item, cost: float = inf) -> None:
        """Add the cost of `item` in S and `other` outside; with no number it cannot be."""
        self._add(self._vertex(item), self._vertex(other), cost)

    def solve(self) -> set[Item]:
        """The smallest S of least cost."""
        while (path := self._shortest_path())[1] >= 0:
            self._push(path)
        reached = path
        return {item for item, vertex in self._index.items() if reached[vertex] >= 0}

    def _vertex(self, item: Item) -> int:
        if item not in self._index:
            self._index[item] = len(self._capacities)
            self._capacities.append({})
        return self._index[item]

    def _add(self, start: int, end: int, capacity: float) -> None:
        self._capacities[start][end] = self._capacities[start].get(end, 0.0) + capacity
        self._capacities[end].setdefault(start, 0.0)

    def _shortest_path(self) -> list[int]:
        """Of each vertex that can be reached from the source: the one before it; -1 of the others."""
        before = [-1] * len(self._capacities)
        before[0] = 0
        queue = deque([0])
        while queue:
            start = queue.popleft()
            for end, capacity in self._capacities[start].items():
                if capacity > 0 and before[end] < 0:
                    before[end] = start
                    queue.append(end)
        return before

    def _push(self, before: list[int]) -> None:
        """Send along a path what fits."""
        edges, vertex = list[tuple[int, int]](), 1
        while vertex:
            edges.append((before[vertex], vertex))
            vertex = before[vertex]
        amount = min(self._capacities[start][end] for start, end in edges)
        for start, end in edges:
            self._capacities[start][end] -= amount
            self._capacities[end][start] += amount
