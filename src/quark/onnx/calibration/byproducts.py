"""Byproducts of calibration: values that the pass over the data gives in addition to ranges.

means      of the outputs of layers, for bias correction; of a linear layer they follow from its input, which is
           observed in any case; other means are computed by the model, so that no tensor is stored for them
outputs    of the model, which those of quantized models are compared with; outputs of all samples, as far as memory
           allows, are for the comparison with the file that was written
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
from quark.onnx.operators import result_axis
from quark.onnx_ops.graph_writer import add_constant

AT_ONCE = 16
"""Samples whose means a linear layer computes at once."""
_AXES_ARE_INPUTS = 18
"""The opset from which on ReduceMean reads its axes."""


class Collector(Protocol):
    """Sees the values of a tensor, sample by sample."""

    def update(self, x: Any) -> None:
        """See the values of one sample."""


class SampleRows:
    """Rows that come sample by sample, in one array: many small ones would fragment the memory of a run.

    Attributes:
        samples: How many have come.
    """

    def __init__(self) -> None:
        self.samples, self._count, self._rows = 0, 0, np.empty((0, 0))

    def add(self, rows: NumpyArray, samples: int = 1) -> None:
        """Add those of one sample or of several, shape (examples, channels)."""
        count = self._count + len(rows)
        if count > len(self._rows) or not self._rows.shape[1]:  # the first sample may be empty
            larger = np.empty((max(16, 2 * count), rows.shape[1]))
            if self._count:
                larger[: self._count] = self._rows[: self._count]
            self._rows = larger
        self._rows[self._count : count] = rows
        self.samples, self._count = self.samples + samples, count

    def times(self, factors: NumpyArray) -> SampleRows:
        """Rows whose channels are multiplied."""
        made = SampleRows()
        made.samples, made._count, made._rows = self.samples, self._count, self.array * factors
        return made

    @property
    def array(self) -> NumpyArray:
        """All of them."""
        return self._rows[: self._count]


class Linear(Protocol):
    """A layer whose means follow from its input: `linear_means.LinearMeans`."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for layers whose `inputs` are equal for one tensor."""

    def inputs(self, x: NumpyArray) -> NumpyArray:
        """The values that the means follow from, (examples, ...)."""

    def __call__(self, means: NumpyArray) -> NumpyArray:
        """The means, (examples, channels)."""


class SampleOutputs:
    """Outputs of a float model by sample: of all while they are few, else of every second, fourth, ... one.

    Args:
        names: Of the outputs.
        memory: Bytes that are stored.
    """

    def __init__(self, names: Sequence[str], memory: int) -> None:
        self.names, self._memory, self._stride = list(names), memory, 1
        self._outputs: dict[int, dict[str, NumpyArray]] = {}
        self._bytes = 0
        self._form: object = None

    def begin(self, model: ir.Model) -> None:
        """Forget all: this model is to run over the samples from the first on."""
        self._outputs, self._bytes, self._stride, self._form = {}, 0, 1, _form(model)

    def add(self, sample: int, name: str, x: NumpyArray) -> None:
        """Take an output of a sample."""
        if sample % self._stride == 0:
            self._outputs.setdefault(sample, {})[name] = x
            self._bytes += x.nbytes
        while len(self._outputs) > 1 and self._bytes > self._memory:
            self._stride *= 2
            self._outputs = {one: each for one, each in self._outputs.items() if one % self._stride == 0}
            self._bytes = sum(x.nbytes for each in self._outputs.values() for x in each.values())

    def of(self, sample: int) -> list[NumpyArray] | None:
        """All outputs of a sample, in the order of their names, if they were kept."""
        found = self._outputs.get(sample, {})
        return [found[name] for name in self.names] if all(name in found for name in self.names) else None

    def are_of(self, model: ir.Model) -> bool:
        """True for the model that ran, node for node and weight for weight."""
        return self._form is not None and self._form == _form(model)


def _form(model: ir.Model) -> object:
    """Nodes and weights of a model, to be compared; a weight is the tensor object, which the caller keeps alive."""
    nodes = []
    for node in model.graph:
        attributes = sorted((name, _attribute_value(one)) for name, one in node.attributes.items())
        names = [[None if value is None else value.name for value in values] for values in (node.inputs, node.outputs)]
        nodes.append((node.domain, node.op_type, node.overload, names, attributes))
    weights = {name: id(value.const_value) for name, value in model.graph.initializers.items()}
    return nodes, weights, [value.name for value in model.graph.outputs], sorted(map(str, model.functions))


def _attribute_value(attribute: ir.Attr) -> str | bytes:
    objects = (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS, ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    if attribute.is_ref() or attribute.type in objects:
        return ir.to_proto(attribute).SerializeToString()
    return repr((attribute.type, attribute.value))


@dataclass(frozen=True)
class Channels:
    """Factors of the channels of a tensor.

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
class Byproducts:
    """Values that a pass over the data is to give in addition to ranges; after calibration has run, what it gave.

    Attributes:
        axes: Name of a tensor whose means are wanted -> axis of its channels.
        linear: Name of such a tensor -> name of its input, and the layer that gives it, if that is linear.
        means: Name -> the means, shape (examples, channels).
        samples: Positions of the samples of which the outputs are stored.
        output_names: Names of these outputs.
        outputs: (sample among these, name) -> an output.
        all_outputs: Takes outputs of all samples; of the model itself, so not of one with rescaled channels.
        rescaled: Name of a tensor -> factors of its channels in the equalized model.
        observers: Name of a tensor that has a range -> its observer in the equalized model.
        waiting: (name of a tensor, `Linear.key` of its reader) -> sums over it, while the model runs.
    """

    axes: Mapping[str, int] = field(default_factory=dict)
    linear: dict[str, tuple[str, Linear]] = field(default_factory=dict)
    means: dict[str, SampleRows] = field(default_factory=dict)
    samples: Sequence[int] = ()
    output_names: Sequence[str] = ()
    outputs: Store = field(default_factory=Store)
    all_outputs: SampleOutputs | None = None
    rescaled: Mapping[str, Channels] = field(default_factory=dict)
    observers: dict[str, Observer] = field(default_factory=dict)
    waiting: dict[tuple[Any, ...], _LinearCollector] = field(default_factory=dict)

    def want_means(self, nodes: Sequence[ir.Node], linear: Callable[[ir.Node], Linear | None]) -> None:
        """Ask for the means of the outputs of nodes.

        Args:
            nodes: The nodes.
            linear: Node -> the layer that it is, if its means follow from its input.
        """
        axes = {node.outputs[0].name or "": result_axis(node) for node in nodes}
        self.axes = {name: axis for name, axis in axes.items() if axis is not None}
        self.linear = {}
        for node in nodes:
            source, layer = node.inputs[0], linear(node)
            if source is not None and source.name and source.dtype is ir.DataType.FLOAT and layer is not None:
                self.linear[node.outputs[0].name or ""] = source.name, layer

    def complete(self) -> None:
        """Compute the means of all sums that are left; the samples have ended."""
        for collector in self.waiting.values():
            collector.complete()
        self.waiting.clear()

    @property
    def has_outputs(self) -> bool:
        """True where all outputs that were asked for came."""
        return all((index, name) in self.outputs for index in range(len(self.samples)) for name in self.output_names)

    def of_equalized(self) -> Byproducts:
        """Means and ranges as a pass over the equalized model gives them."""
        means = {
            name: rows.times(self.rescaled[name].factors) if name in self.rescaled else rows
            for name, rows in self.means.items()
        }
        return Byproducts(means=means, observers=self.observers)

    def fill(self, observers: Mapping[ir.Value, Observer]) -> bool:
        """Restore observers from those of a pass before; False, and nothing is changed, where one has another spec."""
        before = {root: self.observers.get(root.name or "") for root in observers}
        if not self.observers or any(one is None or one.spec != observers[root].spec for root, one in before.items()):
            return False
        for root, one in before.items():
            assert one is not None
            observers[root].restore(one.state())
        return True

    def collectors(
        self,
        classes: Mapping[ir.Value, Sequence[str]],
        observers: Mapping[ir.Value, Observer],
        make: Callable[[TensorSpec], Observer],
    ) -> dict[str, Collector]:
        """Name of a tensor -> its observer, which some share with an observer of the equalized model.

        Args:
            classes: The tensor that stands for a class -> names of its tensors.
            observers: Of each class.
            make: Makes a new observer of a spec.
        """
        changed = [root for root, names in classes.items() if any(name in self.rescaled for name in names)]
        equalized = {root: make(observers[root].spec) for root in changed}
        if equalized:
            self.observers = {root.name or "": equalized.get(root, observers[root]) for root in classes}
        return {
            name: _BothModels(observers[root], equalized[root], self.rescaled.get(name))
            if root in equalized
            else observers[root]
            for root, names in classes.items()
            for name in names
        }


@dataclass
class _BothModels:
    one: Collector
    equalized: Observer
    channels: Channels | None

    def update(self, x: Any) -> None:
        """Update both observers with the values of one sample, rescaled for the equalized model."""
        self.one.update(x)
        self.equalized.update(x if self.channels is None else self.channels(x))


@dataclass
class _OutputCollector:
    name: str
    byproducts: Byproducts
    other: Collector | None
    count: int = 0

    def update(self, x: Any) -> None:
        """See an output of one sample."""
        if self.name in self.byproducts.output_names and self.count in self.byproducts.samples:
            self.byproducts.outputs[list(self.byproducts.samples).index(self.count), self.name] = x
        if self.byproducts.all_outputs is not None and self.name in self.byproducts.all_outputs.names:
            self.byproducts.all_outputs.add(self.count, self.name, x)
        self.count += 1
        if self.other is not None:
            self.other.update(x)


def with_byproducts(
    byproducts: Byproducts, model: ir.Model, observers: Mapping[str, Collector], padding: Padding
) -> tuple[ir.Model, Mapping[str, Collector]]:
    """A model that computes the means too, and the collectors of means and outputs together with the observers.

    Args:
        byproducts: The byproducts that are wanted.
        model: The model, not changed.
        observers: Of tensors of the model, by name.
        padding: Of the model; byproducts are taken of models without masks only.
    """
    if padding.masks:
        return model, observers
    both, given = dict(observers), model.clone()
    made = {value.name or "": value for node in given.graph for value in node.outputs}
    _watch_means(byproducts, made, both)
    outputs = dict.fromkeys(byproducts.output_names)
    if byproducts.all_outputs is not None:
        byproducts.all_outputs.begin(model)
        outputs |= dict.fromkeys(byproducts.all_outputs.names)
    # What is a sequence is no array.
    taken = [name for name in outputs if name in made and isinstance(made[name].type, ir.TensorType)]
    both |= {name: _OutputCollector(name, byproducts, both.get(name)) for name in taken}
    return given, both


def _watch_means(byproducts: Byproducts, made: Mapping[str, ir.Value], collectors: dict[str, Collector]) -> None:
    """Add collectors of the means that are wanted, and nodes that compute some of them.

    Args:
        byproducts: The byproducts that are wanted.
        made: The tensors of the model by name.
        collectors: Of tensors, by name; changed in place.
    """
    for name, axis in byproducts.axes.items():
        byproducts.means[name] = SampleRows()
        if name not in byproducts.linear:
            reduced = _add_mean(made[name], axis)
            other = None if reduced else collectors.get(name)
            collectors[reduced or name] = _MeanCollector(-1 if reduced else axis, byproducts.means[name], other)
    byproducts.waiting.clear()
    for name, (source, layer) in byproducts.linear.items():
        if name in byproducts.axes:
            collector = byproducts.waiting.setdefault((source, *layer.key), _LinearCollector())
            collector.layers.append((layer, byproducts.means[name]))
    for (source, *_), collector in byproducts.waiting.items():
        collector.other, collectors[source] = collectors.get(source), collector


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


@dataclass
class _LinearCollector:
    """Sums up the inputs of linear layers, and computes the means of their outputs many at once: weights are long."""

    layers: list[tuple[Linear, SampleRows]] = field(default_factory=list)
    other: Collector | None = None
    inputs: list[NumpyArray] = field(default_factory=list)

    def update(self, x: Any) -> None:
        """See the values of one sample."""
        self.inputs.append(self.layers[0][0].inputs(x))
        if len(self.inputs) >= AT_ONCE:
            self.complete()
        if self.other is not None:
            self.other.update(x)

    def complete(self) -> None:
        """Compute the means of the inputs that came."""
        if self.inputs:
            read = np.concatenate(self.inputs)
            for layer, found in self.layers:
                found.add(layer(read), len(self.inputs))
            self.inputs.clear()


def _add_mean(value: ir.Value, axis: int) -> str | None:
    """Let a model compute the means over positions of a tensor; None where it cannot, or not well."""
    node, rank = value.producer(), 0 if value.shape is None else len(value.shape)
    if node is None or node.graph is None or rank < 3 or value.dtype is not ir.DataType.FLOAT:
        return None
    name, axes = f"{value.name}_quark_mean", [each for each in range(1, rank) if each != axis % rank]
    opset = node.graph.opset_imports.get("") or 0
    if opset < _AXES_ARE_INPUTS:
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
    if rows.dtype == np.float32 and rows.ndim > 2 and rows.size and rows.flags.c_contiguous:
        # The product with a row of ones reads them once, and takes a quarter of the time.
        rows = rows.reshape(len(rows), -1, rows.shape[-1])
        return np.asarray((np.ones((1, rows.shape[1]), np.float32) @ rows)[:, 0], np.float64) / rows.shape[1]
    return np.asarray(rows.mean(tuple(range(1, rows.ndim - 1)), dtype=np.float64))
