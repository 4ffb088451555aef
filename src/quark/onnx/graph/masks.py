"""Attention masks: tensors that carry, beside other values, a number which only makes weights zero.

No scale serves both, and in a block format one such value takes the exponent of its block: the others become 0.

    the most negative float, -inf     is a mask wherever it stands
    any other number                  is one where it is added, or selected, on the way to a Softmax, or to what else
                                      only its largest inputs matter to

What is added on the way to a Softmax is a mask if it spreads over more than `_MOST_NATS` and no layer computes it: it
alone decides then which weights are 0, as e^-64 of another is less than float32 adds to 1. Finite masks (-100 in Swin,
-1e4 in BERT, -1e9 in TensorFlow) and the slopes of ALiBi are such. What layers compute is one beyond `_MOST_LOGITS`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.operators import LAYERS, ON_REQUEST, RECURRENT, RULES, SIMULATED, rule_of

MASK = 1e30
"""Larger magnitudes are masks (the most negative float before a Softmax): they stay in float."""
_HALF_MASK = 6e4
_MOST_NATS = 64.0
"""A step of 8 bits over this range is 1/4: weights of a Softmax are then off by 7 % (23 dB), beyond it by more."""
_MOST_LOGITS = 1e3
"""The range for outputs of layers, which spread for other reasons, and before an operator without an exponent."""

_ADDS = {"Add", "Sub", "Sum"}
_SELECTS = {"Where", "Min", "Max", "ScatterND", "ScatterElements", "Concat", "Pad"}
"""Op types whose output holds values of one input or of another."""
SCALES = {"Mul", "Div", "Neg", "Cast", "Clip", "Log", "LogSoftmax"}
MOVES = {name for name, rule in {**RULES, **ON_REQUEST}.items() if rule.shares_scale}
_CARRIES = _ADDS | _SELECTS | SCALES | MOVES

_EXPONENTIAL = {"Softmax", "LogSoftmax", "Exp", "ReduceLogSumExp", "Sigmoid"}
"""Op types to which inputs many nats below the largest, or below 0, are all the same."""
LARGEST = {"ReduceMax", "ReduceMin", "ArgMax", "ArgMin", "TopK", "Hardmax"}
"""Op types that look for the largest, or smallest, of their inputs."""
_ADDED_WITHIN = {("", "Attention"): 3, ("com.microsoft", "Attention"): 5, ("com.microsoft", "MultiHeadAttention"): 5,
                ("com.microsoft", "GroupQueryAttention"): 10, ("com.microsoft", "BiasSoftmax"): 1}  # fmt: skip
"""Operators with a Softmax inside -> index of the input that they add before it."""
COMPUTES = {*LAYERS, "Einsum", *RECURRENT}

Range = tuple[float, float]
_RangeOf = Callable[[ir.Value], Range | None]
"""The smallest and the largest value of a tensor; None where that is not known."""


def is_mask(value: ir.Value) -> bool:
    """Return True where a constant, or what a ConstantOfShape fills with, is -inf, NaN, or the -3e38 of a mask."""
    node = value.producer()
    filling = node is not None and is_op(node, "ConstantOfShape") and node.attributes.get("value")
    array = filling.as_tensor().numpy() if filling else constant(value)
    if array is None or array.dtype.kind != "f" or not array.size:
        return False
    return not bool((abs(array.astype(np.float64)) <= limit(array.dtype.name)).all())


def limit(dtype: str) -> float:
    """The magnitude over which values of a float type are a mask: float16 ends at 65504."""
    return _HALF_MASK if dtype == "float16" else MASK


def masked_values(graph: ir.Graph) -> set[ir.Value]:
    """The tensors of a graph that hold values of a mask, the most negative float or -inf."""
    found: set[ir.Value] = set()
    for node in graph:
        if node.op_type in _CARRIES and any(v is not None and (v in found or is_mask(v)) for v in node.inputs):
            found.update(node.outputs)
    return found


def added_masks(graph: ir.Graph, range_of: _RangeOf) -> set[ir.Value]:
    """The masks that are added or selected on the way to a Softmax, and every tensor there that carries one.

    Args:
        graph: Its nodes in order.
        range_of: The ranges of tensors that are no constants. A tensor without one that no layer computes may be a
            mask, and counts as one.
    """
    masks = _Masks(graph, range_of)
    for node in graph:
        masks.find_added(node)
    for node in reversed(graph):
        masks.find_after(node)
    return {value for value in masks.found if _may_be_float(value)}


class _Masks:
    """The search for masks: `found` grows."""

    def __init__(self, graph: ir.Graph, range_of: _RangeOf) -> None:
        self.range_of, self.least, self.computed = range_of, _ways(graph), _computed_by_layers(graph)
        self.possible = _possible_ranges(graph, range_of, self.computed)
        self.found: set[ir.Value] = set()

    def _is_wide(self, value: ir.Value, most: float, about: Callable[[Range], float], unknown: bool = True) -> bool:
        limits = self.possible.get(value)
        if value in self.computed:
            return limits is not None and most < _MOST_LOGITS < about(limits)
        return unknown if limits is None else about(limits) > most

    def find_added(self, node: ir.Node) -> None:
        """Find what the node adds or selects, and what it gives on."""
        operands = _operands(node)
        for output in [value for value in node.outputs if value in self.least and operands]:
            most, seen = self.least[output], self.range_of(output)
            if node.op_type in _ADDS | _SELECTS:
                about = _spread if node.op_type in _ADDS else _magnitude
                unknown = seen is None or _spread(seen) > most
                self.found.update(value for value in operands if self._is_wide(value, most, about, unknown))
            if not self.found.isdisjoint(operands):
                self.found.add(output)

    def find_after(self, node: ir.Node) -> None:
        """Find what a mask that the node gives is computed of."""
        if self.found.isdisjoint(node.outputs):
            return
        given = [value for value in node.inputs if value is not None and value not in self.computed]
        reaching = [value for value in given if value in self.least]
        self.found.update(value for value in reaching if self._is_wide(value, self.least[value], _spread))
        if self.computed.isdisjoint(node.outputs):
            # A mask is what is computed here: an error of 1 - m is magnified to one of (1 - m) * -1e4.
            self.found.update(value for value in given if _may_be_float(value) and _only_for(value, self.found))


def _ways(graph: ir.Graph) -> dict[ir.Value, float]:
    """The tensors that reach a Softmax, or the like, with nothing but sums, choices and moves between.

    Returns:
        Each -> how far a mask among them spreads at least.
    """
    least: dict[ir.Value, float] = {}
    for node in reversed(graph):
        op_type, inputs = SIMULATED.get(node.op_type, node.op_type), list[ir.Value | None]()
        reached = [least[output] for output in node.outputs if output in least and op_type in _CARRIES]
        if reached:
            inputs += _operands(node)
        if op_type in _EXPONENTIAL | LARGEST:
            inputs += node.inputs[:1]
            reached.append(_MOST_NATS if op_type in _EXPONENTIAL else _MOST_LOGITS)
        within = _ADDED_WITHIN.get((node.domain, op_type))
        if within is not None:
            inputs += node.inputs[within : within + 1]
            reached.append(_MOST_NATS)
        for value in inputs:
            if value is not None:
                least[value] = min([*reached, least.get(value, _MOST_LOGITS)])
    return least


def _computed_by_layers(graph: ir.Graph) -> set[ir.Value]:
    """Return what layers compute, alone or with others; not a product of two tensors that nothing but integers make."""
    computed = set[ir.Value]()
    floats = {value for value in graph.inputs if _may_be_float(value)}
    for node in graph:
        given = [value for value in node.inputs if value is not None]
        from_layers = any(value in computed for value in given)
        if node.op_type in COMPUTES:
            from_layers |= any(value in floats or is_constant(value) for value in given)
        outputs = [value for value in node.outputs if _may_be_float(value)]
        if from_layers:
            computed.update(outputs)
        if any(value in floats for value in given):
            floats.update(outputs)
    return computed


def _possible_ranges(graph: ir.Graph, range_of: _RangeOf, computed: set[ir.Value]) -> dict[ir.Value, Range]:
    """Return the ranges that tensors have, or may have: a mask of 1 and 0 is all 1 where samples are not padded.

    An input, and what is computed of integers, may be 0 and 1. Of what layers compute, only what was seen is known.
    """
    possible = _constant_ranges(graph)

    def note(value: ir.Value, limits: Range | None) -> None:
        both = _either(limits, range_of(value))
        if both is not None:
            possible[value] = both

    for value in graph.inputs:
        if range_of(value) is not None or not _may_be_float(value):
            note(value, (0.0, 1.0))
    for node in graph:
        operands = _operands(node)
        known = [possible[value] for value in operands if value in possible]
        complete = known and len(known) == len(operands)
        follows = _result(node.op_type, known) if complete else None
        for output in node.outputs:
            limits = follows if complete or _may_be_float(output) else (0.0, 1.0)
            note(output, None if output in computed else limits)
    return possible


def _either(one: Range | None, other: Range | None) -> Range | None:
    """The range of what is in one or the other."""
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])


def _result(op_type: str, given: list[Range]) -> Range | None:
    """The range of what an operator that carries a mask gives for these; None where it is not told."""
    if op_type in ("Log", "LogSoftmax", "Div"):
        return None
    if op_type == "Neg":
        return _negative(given[0])
    if op_type == "Sub" and len(given) == 2:
        given = [given[0], _negative(given[1])]
    if op_type in _ADDS:
        return sum(low for low, _ in given), sum(high for _, high in given)
    if op_type == "Mul" and len(given) == 2:
        return _product(*given)
    return min(low for low, _ in given), max(high for _, high in given)


def _negative(limits: Range) -> Range:
    return -limits[1], -limits[0]


def _product(one: Range, other: Range) -> Range:
    """The range of products; 0 times the -inf of a mask is none of them."""
    ends = [x * y for x in one for y in other if not (x == 0 or y == 0)]
    return min(ends, default=0.0), max([*ends, 0.0])


def _operands(node: ir.Node) -> list[ir.Value]:
    """The inputs whose values a node gives on, or adds."""
    if node.op_type not in _CARRIES:
        return []
    indices = [*rule_of(node.op_type).inputs(node), *([2] if node.op_type == "Pad" else [])]
    values = [node.inputs[index] for index in indices if index < len(node.inputs)]
    return [value for value in values if value is not None]


def _only_for(value: ir.Value, found: set[ir.Value]) -> bool:
    """Return True where whatever reads a value gives one of those that were found."""
    readers = [use.node for use in value.uses()]
    return not value.is_graph_output() and all(any(out in found for out in node.outputs) for node in readers)


def _may_be_float(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype.is_floating_point()


def _constant_ranges(graph: ir.Graph) -> dict[ir.Value, Range]:
    """Return the range of each constant that a node reads; (0, 0) where it has no numbers."""
    ranges: dict[ir.Value, Range] = {}
    for value in {value for node in graph for value in node.inputs if value is not None and is_constant(value)}:
        array = constant(value)
        has_numbers = array.size and array.dtype.kind in "fiub"
        ranges[value] = (float(array.min()), float(array.max())) if has_numbers else (0.0, 0.0)
    return ranges


def _spread(limits: Range) -> float:
    return limits[1] - limits[0]


def _magnitude(limits: Range) -> float:
    return max(abs(limits[0]), abs(limits[1]))
