"""Visits quantized layers in order, each with what it reads and what it should give, for every sample.

Inputs are those of the quantized model as it is by then, layers before already improved; outputs are the float
model's. Both models run once over the data, slice by slice, however many layers are visited. Of a matrix product the
rows at real positions are given, where a sample that the model takes whole is padded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import onnx_ir as ir

from quark.base.progress import progress
from quark.core.array import NumpyArray
from quark.onnx.algorithms.quantized_layers import QuantizedLayer, QuantizedLayers
from quark.onnx.algorithms.sliced_run import SlicedRun
from quark.onnx.calibration.data.padding import Padding
from quark.onnx.calibration.data.samples import MEMORY, Samples, Store
from quark.onnx.operators import PRODUCTS


class RealRows:
    """Cuts the tensors of samples to their real positions, of which each is a row; never cuts columns.

    Args:
        padding: Of the model that the samples are for.
        data: The samples.
    """

    def __init__(self, padding: Padding, data: Samples) -> None:
        self._padding, self._data = padding, data

    def __call__(self, sample: int, array: NumpyArray) -> NumpyArray:
        """The rows of a tensor."""
        if not self._padding.masks:
            return array
        (found,) = self._padding.at_real(self._data[sample], [array])
        return found if found.shape[-1:] == array.shape[-1:] else array

    def examples(self, sample: int, rows: NumpyArray) -> list[NumpyArray]:
        """Split rows that a call gave, (1, rows, ..), by the examples of the sample; leave others whole."""
        if not self._padding.masks or rows.ndim < 3 or len(rows) > 1:
            return [rows]
        for real in self._padding.real(self._data[sample]).values():
            counts = real.sum(1)
            if counts.sum() == rows.shape[1]:
                return np.split(rows, np.cumsum(counts[counts > 0])[:-1], 1)
        return [rows]


class Column(Sequence[NumpyArray]):
    """One tensor, sample by sample; read where it waits."""

    def __init__(self, walk: SlicedRun, value: ir.Value, real: RealRows | None) -> None:
        self._walk, self._value, self._real = walk, value, real

    def __len__(self) -> int:
        return self._walk.count

    @overload
    def __getitem__(self, index: int) -> NumpyArray: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[NumpyArray]: ...
    def __getitem__(self, index: int | slice) -> NumpyArray | Sequence[NumpyArray]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        array = self._walk.value(index % len(self), self._value)
        return array if self._real is None else self._real(index % len(self), array)


@dataclass
class Visit:
    """One layer of a sweep.

    Attributes:
        layer: The layer; what its weight and bias are set to is what later layers see.
        inputs: What it reads in the quantized model.
        float_inputs: What it reads in the float model; empty unless they were asked for.
        outputs: What it gives in the float model, before its activation.
    """

    layer: QuantizedLayer
    inputs: Sequence[NumpyArray]
    float_inputs: Sequence[NumpyArray]
    outputs: Sequence[NumpyArray]
    _walk: SlicedRun
    _output: ir.Value
    _real: RealRows | None

    def quantized_outputs(self) -> Iterator[NumpyArray]:
        """Yield the layer's output in the quantized model as it is now, before its activation, sample by sample."""
        found = self._walk.peek(self._output)
        return found if self._real is None else itertools.starmap(self._real, enumerate(found))

    def examples(self, sample: int, array: NumpyArray) -> list[NumpyArray]:
        """An output, or what is computed of it for each row, apart for the examples that lie in its sample padded."""
        return [array] if self._real is None else self._real.examples(sample, array)


def sweep(
    quantized: QuantizedLayers,
    layers: Sequence[QuantizedLayer],
    data: Samples,
    count: int | None = None,
    memory: int = MEMORY,
    folder: str | None = None,
    float_inputs: bool = False,
) -> Iterator[Visit]:
    """Visit layers in the order of the graph.

    Args:
        quantized: The models.
        layers: Which of `quantized.layers`.
        data: The samples.
        count: How many of them; None for all.
        memory: Bytes of activations that stay in memory; more waits in files.
        folder: Where these files are made; None for the system's temporary folder.
        float_inputs: Whether what the layers read in the float model is wanted: a session more for each.
    """
    count, store = min(count or len(data), len(data)), Store(memory, folder)
    reads = {layer: quantized.input_of(layer) for layer in layers}
    quantized_run = SlicedRun(quantized.decision.model, data, count, store, reads.values())
    # Of each layer what it reads and gives in the float model.
    wanted = {layer: [*([layer.data] if float_inputs else []), layer.counterpart.outputs[0]] for layer in layers}
    goals = [value for values in wanted.values() for value in values]
    reference = SlicedRun(quantized.reference, data, count, store, goals)
    left, real = [*goals, *reads.values()], RealRows(Padding.of(quantized.reference), data)
    for layer in progress(layers, "layers", len(layers), name=lambda layer: layer.name):
        data.check_time()
        mine = [(quantized_run, reads[layer]), *((reference, value) for value in wanted[layer])]
        for run, value in mine:
            run.reach(value)
        # The positions of a convolution are not apart.
        rows = real if layer.counterpart.op_type in PRODUCTS else None
        inputs, *before, outputs = (Column(run, value, rows) for run, value in mine)
        output = quantized.output_of(layer)
        yield Visit(layer, inputs, before[0] if before else (), outputs, quantized_run, output, rows)
        for run, value in mine:
            left.remove(value)
            if value not in left:
                run.release(value)
