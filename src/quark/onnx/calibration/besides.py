"""What one pass of calibration over the data gives besides ranges, so that the float model need not run again.

means      of what layers give, for bias correction; the model computes them, so that no output leaves it for its
           mean alone, and none waits
outputs    of the model, which quantized ones are compared with
equalized  ranges and means of the same model with rescaled channels: of x * s instead of x
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.core.observers.base import Observer
from quark.core.spec import TensorSpec
from quark.onnx.calibration.data.padding import Padding
from quark.onnx.calibration.data.samples import Store
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
        if count > len(self._held) or not self._held.shape[1]:  # the first sample may be empty
            held = np.empty((max(16, 2 * count), rows.shape[1]))
            if self._count:
                held[: self._count] = self._held[: self._count]
            self._held = held
        self._held[self._count : count] = rows
        self.samples, self._count = self.samples + 1, count

    def times(self, factors: NumpyArray) -> SampleRows:
        """Rows whose channels are multiplied."""
        made = SampleRows()
        made.samples, made._count, made._held = self.samples, self._count, self.array * factors
        return made

    @property
    def array(self) -> NumpyArray:
        """All of them."""
        return self._held[: self._count]


@dataclass(frozen=True)
class Channels:
    """What the channels of a tensor are multiplied by.

    Attributes:
        axis: Of the channels.
        factors: One for each.
    """

    axis: int
    factors: NumpyArray

    def __call__(self, x: NumpyArray) -> NumpyArray:
        """The product, in the type of the tensor."""
        shape = [1] * x.ndim
        shape[self.axis] = len(self.factors)
        return np.asarray(x * self.factors.reshape(shape).astype(x.dtype))


@dataclass
class Besides:
    """What is asked of a pass over the data, and what it gave, if calibration ran.

    Attributes:
        axes: Name of a tensor whose means are wanted -> axis of its channels.
        found: Name -> the means, shape (examples, channels).
        samples: Positions of the samples of which the outputs are kept.
        outputs: Names of outputs.
        kept: (sample among these, name) -> an output.
        rescaled: Name of a tensor -> what it is multiplied by in the equalized model.
        seen: Name of a tensor that has a range -> what observed it; in the equalized model.
    """

    axes: Mapping[str, int] = field(default_factory=dict)
    found: dict[str, SampleRows] = field(default_factory=dict)
    samples: Sequence[int] = ()
    outputs: Sequence[str] = ()
    kept: Store = field(default_factory=Store)
    rescaled: Mapping[str, Channels] = field(default_factory=dict)
    seen: dict[str, Observer] = field(default_factory=dict)

    def want_means(self, nodes: Sequence[ir.Node]) -> None:
        """Ask for those of what nodes give."""
        axes = {node.outputs[0].name or "": result_axis(node) for node in nodes}
        self.axes = {name: axis for name, axis in axes.items() if axis is not None}

    @property
    def has_outputs(self) -> bool:
        """Whether all that were asked for came."""
        return all((index, name) in self.kept for index in range(len(self.samples)) for name in self.outputs)

    def of_equalized(self) -> Besides:
        """What was seen, as the pass over the equalized model would have found it."""
        found = {
            name: rows.times(self.rescaled[name].factors) if name in self.rescaled else rows
            for name, rows in self.found.items()
        }
        return Besides(found=found, seen=self.seen)

    def knows(self, observers: Mapping[ir.Value, Observer]) -> bool:
        """Whether these observers need not see the data: others of the same specs have, and are taken over."""
        seen = {root: self.seen.get(root.name or "") for root in observers}
        if not self.seen or any(other is None or other.spec != observers[root].spec for root, other in seen.items()):
            return False
        for root, other in seen.items():
            assert other is not None
            observers[root].restore(other.state())
        return True

    def watchers(
        self,
        classes: Mapping[ir.Value, Sequence[str]],
        observers: Mapping[ir.Value, Observer],
        make: Callable[[TensorSpec], Observer],
    ) -> dict[str, Collector]:
        """What looks at tensors: their observers, some of which let others see the equalized model.

        Args:
            classes: The tensor that stands for a class -> names of its tensors.
            observers: Of each class.
            make: An observer of a spec that has seen nothing.
        """
        changed = [root for root, names in classes.items() if any(name in self.rescaled for name in names)]
        twins = {root: make(observers[root].spec) for root in changed}
        if twins:
            self.seen = {root.name or "": twins.get(root, observers[root]) for root in classes}
        return {
            name: _Twins(observers[root], twins[root], self.rescaled.get(name)) if root in twins else observers[root]
            for root, names in classes.items()
            for name in names
        }


@dataclass
class _Twins:
    one: Collector
    other: Observer
    channels: Channels | None

    def update(self, x: Any) -> None:
        """See the values of one sample, and what they are in the equalized model."""
        self.one.update(x)
        self.other.update(x if self.channels is None else self.channels(x))


@dataclass
class _OutputCollector:
    name: str
    besides: Besides
    other: Collector | None
    count: int = 0

    def update(self, x: Any) -> None:
        """See an output of one sample."""
        if self.count in self.besides.samples:
            self.besides.kept[list(self.besides.samples).index(self.count), self.name] = x
        self.count += 1
        if self.other is not None:
            self.other.update(x)


def beside(
    besides: Besides | None, model: ir.Model, observers: Mapping[str, Collector], padding: Padding
) -> tuple[ir.Model, Mapping[str, Collector]]:
    """A model that gives means too, and what looks at them and at outputs, beside observers of other tensors.

    Args:
        besides: What is wanted, if anything is.
        model: The model, not changed.
        observers: Those of its tensors, by name.
        padding: Of the model; of one that masks nothing is taken.
    """
    if besides is None or padding.masks:
        return model, observers
    both, model = dict(observers), model.clone()
    by_name = {value.name or "": value for node in model.graph for value in node.outputs}
    for name, axis in besides.axes.items():
        besides.found[name] = SampleRows()
        reduced = _add_mean(by_name[name], axis)
        other = None if reduced else observers.get(name)
        both[reduced or name] = _MeanCollector(-1 if reduced else axis, besides.found[name], other)
    both |= {name: _OutputCollector(name, besides, both.get(name)) for name in besides.outputs if name in by_name}
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
