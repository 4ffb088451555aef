"""A declarative matcher of subgraphs: a pattern is a term whose leaves name values.

    HALF_SUM = op("Mul", op("Add", "x", "y"), 0.5)
    found = match(HALF_SUM, node)        # found["x"], found["y"], found.nodes

A name stands for one value, wherever it occurs; a number for a constant of one element; Const for any constant.
Add and Mul match in either order. Inputs after those that a pattern lists must be constants (axes, bounds).
Values between the matched nodes may have no other readers, and no constant may have more dimensions than what the names
stand for, which the result would then have too: the subgraph can be replaced as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Union

import onnx_ir as ir

from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import constant, is_constant

_COMMUTATIVE = ("Add", "Mul")
_BROADCASTING = (*_COMMUTATIVE, "Sub", "Div", "Pow", "Max", "Min")
"""Op types of which patterns are made, of those of two operands."""
TOLERANCE = 5e-4
"""Relative: exporters round sqrt(2) and its like to half precision and to few digits."""


@dataclass(frozen=True)
class Op:
    """A node of an op type, with patterns of its first inputs."""

    op_type: str
    inputs: tuple[Pattern, ...]


@dataclass(frozen=True)
class Const:
    """A constant, bound to a name."""

    name: str


@dataclass(frozen=True)
class Either:
    """The first of several patterns that fits."""

    patterns: tuple[Pattern, ...]


Pattern = Union[str, float, Op, Const, Either]


def op(op_type: str, *inputs: Pattern) -> Op:
    """A node of an op type."""
    return Op(op_type, inputs)


def either(*patterns: Pattern) -> Either:
    """Any of several patterns."""
    return Either(patterns)


def product(first: Pattern, second: Pattern, third: Pattern) -> Either:
    """Three factors in any order and grouping."""
    orders = ((first, second, third), (first, third, second), (second, third, first))
    return either(*(op("Mul", op("Mul", one, two), last) for one, two, last in orders))


@dataclass(frozen=True)
class Match:
    """The bindings of a pattern: names to values, and the nodes it covers, the last one first."""

    values: dict[str, ir.Value] = field(default_factory=dict)
    nodes: tuple[ir.Node, ...] = ()

    def __getitem__(self, name: str) -> ir.Value:
        return self.values[name]

    def of_type(self, *op_types: str) -> list[ir.Node]:
        """The covered nodes of these op types."""
        return [node for node in self.nodes if node.op_type in op_types]

    @property
    def closed(self) -> bool:
        """True where nothing outside reads a value between the covered nodes."""
        inside = set(self.nodes)
        values = [output for node in self.nodes[1:] for output in node.outputs]
        return not any(v.is_graph_output() or any(use.node not in inside for use in v.uses()) for v in values)

    @property
    def keeps_rank(self) -> bool:
        """True where no constant gives the result more dimensions than every named value has."""
        named = [value.shape for value in self.values.values() if not is_constant(value)]
        least = min((0 if shape is None else len(shape) for shape in named), default=0)
        constants = [
            v for node in self.of_type(*_BROADCASTING) for v in node.inputs if v is not None and is_constant(v)
        ]
        return all(
            (len(value.const_value.shape) if value.const_value is not None else int(constant(value).ndim)) <= least
            for value in constants
        )


def match(pattern: Pattern, node: ir.Node) -> Match | None:
    """The first closed match that ends at a node and keeps its rank, or None."""
    found = _search(pattern, node.outputs[0], Match())
    return next((one for one in found if one.closed and one.keeps_rank), None)


def _search(pattern: Pattern, value: ir.Value | None, found: Match) -> Iterator[Match]:
    if value is None:
        return
    if isinstance(pattern, str):
        if found.values.get(pattern, value) is value:
            yield Match({**found.values, pattern: value}, found.nodes)
    elif isinstance(pattern, Const):
        if is_constant(value):
            yield Match({**found.values, pattern.name: value}, found.nodes)
    elif isinstance(pattern, Either):
        for choice in pattern.patterns:
            yield from _search(choice, value, found)
    elif isinstance(pattern, Op):
        yield from _search_node(pattern, value.producer(), found)
    elif math.isclose(scalar(value), pattern, rel_tol=TOLERANCE):
        yield found


def _search_node(pattern: Op, node: ir.Node | None, found: Match) -> Iterator[Match]:
    if node is None or not is_op(node, pattern.op_type) or len(node.inputs) < len(pattern.inputs):
        return
    count = len(pattern.inputs)
    if any(value is not None and not is_constant(value) for value in node.inputs[count:]):
        return
    found = Match(found.values, (*found.nodes, node))
    orders = permutations(node.inputs) if node.op_type in _COMMUTATIVE else [node.inputs[:count]]
    for inputs in orders:
        yield from _search_all(pattern.inputs, inputs, found)


def _search_all(patterns: Sequence[Pattern], values: Sequence[ir.Value | None], found: Match) -> Iterator[Match]:
    if not patterns:
        yield found
        return
    for first in _search(patterns[0], values[0], found):
        yield from _search_all(patterns[1:], values[1:], first)


def scalar(value: ir.Value | None) -> float:
    """The number in a constant of one element; NaN, which is near nothing, for anything else."""
    if value is None or (value.const_value is not None and value.const_value.size != 1):
        return math.nan
    array = constant(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else math.nan


def clip_bounds(clip: ir.Node) -> tuple[float, float]:
    """Lower and upper bound of a Clip; infinite where there is none, NaN where it is no constant."""
    if clip.attributes:
        return clip.attributes.get_float("min", -math.inf), clip.attributes.get_float("max", math.inf)
    lower, upper = [*clip.inputs[1:], None, None][:2]
    return -math.inf if lower is None else scalar(lower), math.inf if upper is None else scalar(upper)
