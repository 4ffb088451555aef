"""Means of what layers give in the float model, which calibration takes on its way, for bias correction.

The model computes them, so that no output leaves it for its mean alone, and none waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.onnx.calibration.data.padding import Padding
from quark.onnx.operators.axes import result_axis
from quark.onnx_ops.graph_writer import add_constant

AXES_ARE_INPUTS = 18
"""The opset from which on ReduceMean reads its axes."""


class Collector(Protocol):
    """Whatever looks at the values of a tensor, sample by sample."""

    def update(self, x: Any) -> None:
        """See the values of one sample."""


class SampleRows:
    """Rows that come sample by sample, in one array: many small ones would lie between what a run takes and leaves.

    Attributes:
        samples: How many have come.
    """

    def __init__(self) -> None:
        self.samples, self._count, self._held = 0, 0, np.empty((0, 0))

    def add(self, rows: NumpyArray) -> None:
        """Add those of a sample, shape (examples, channels)."""
        count = self._count + len(rows)
        if count > len(self._held):
            held = np.empty((max(16, 2 * count), rows.shape[1]))
            if self._count:
                held[: self._count] = self._held[: self._count]
            self._held = held
        self._held[self._count : count] = rows
        self.samples, self._count = self.samples + 1, count

    @property
    def array(self) -> NumpyArray:
        """All of them."""
        return self._held[: self._count]


@dataclass
class OutputMeans:
    """Of tensors the means of each sample, if calibration ran.

    Attributes:
        axes: Name of a tensor -> axis of its channels.
        found: Name -> the means, shape (examples, channels).
    """

    axes: Mapping[str, int]
    found: dict[str, SampleRows] = field(default_factory=dict)

    @classmethod
    def of(cls, nodes: Sequence[ir.Node]) -> OutputMeans:
        """Those of what nodes give."""
        axes = {node.outputs[0].name or "": result_axis(node) for node in nodes}
        return cls({name: axis for name, axis in axes.items() if axis is not None})


def beside(
    means: OutputMeans | None, model: ir.Model, observers: Mapping[str, Collector], padding: Padding
) -> tuple[ir.Model, Mapping[str, Collector]]:
    """A model that gives means too, and what looks at them, beside observers of other tensors.

    Args:
        means: Those that are wanted, if any are.
        model: The model, not changed.
        observers: Those of its tensors, by name.
        padding: Of the model; of one that masks no means are taken.
    """
    if means is None or padding.masks:
        return model, observers
    both, model = dict(observers), model.clone()
    by_name = {value.name or "": value for node in model.graph for value in node.outputs}
    for name, axis in means.axes.items():
        means.found[name] = SampleRows()
        reduced = _add_mean(by_name[name], axis)
        other = None if reduced else observers.get(name)
        both[reduced or name] = _MeanCollector(-1 if reduced else axis, means.found[name], other)
    return model, both


@dataclass
class _MeanCollector:
    axis: int
    found: SampleRows
    other: Collector | None

    def update(self, x: Any) -> None:
        """See the values of one sample."""
        self.found.add(position_means(x, self.axis))
        if self.other is not None:
            self.other.update(x)


def _add_mean(value: ir.Value, axis: int) -> str | None:
    """Let a model compute the means over positions of a tensor; None where it cannot, or not well."""
    node, rank = value.producer(), 0 if value.shape is None else len(value.shape)
    if node is None or node.graph is None or rank < 3 or value.dtype is not ir.DataType.FLOAT:
        return None
    name, axes = f"{value.name}_quark_mean", [each for each in range(1, rank) if each != axis % rank]
    opset = node.graph.opset_imports.get("") or 0
    if opset < AXES_ARE_INPUTS:
        mean = ir.node("ReduceMean", [value], {"axes": axes, "keepdims": 0})
    else:
        mean = ir.node("ReduceMean", [value, add_constant(node.graph, f"{name}_axes", np.array(axes))], {"keepdims": 0})
    mean.outputs[0].name = name
    node.graph.insert_after(node, [mean])
    return name


def position_means(x: NumpyArray, axis: int) -> NumpyArray:
    """Of each example (the first axis) and channel the mean over positions, shape (examples, channels).

    Args:
        x: A tensor; a vector is one example.
        axis: Of its channels.
    """
    rows = np.moveaxis(np.atleast_2d(x), axis, -1)
    return np.asarray(rows.mean(tuple(range(1, rows.ndim - 1)), dtype=np.float64))
