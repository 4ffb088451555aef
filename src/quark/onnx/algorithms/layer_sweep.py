"""Visits quantized layers in order, each with what it reads and what it should give, for every sample.

Inputs are those of the quantized model as it is by then, layers before already improved; outputs are the float
model's. Both models run once over the data, slice by slice, however many layers are visited.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.onnx.algorithms.quantized_layers import QuantizedLayer, QuantizedLayers
from quark.onnx.algorithms.sliced_run import SlicedRun
from quark.onnx.calibration.data.samples import MEMORY, Samples, Store
from quark.progress import progress


class Column(Sequence[NumpyArray]):
    """One tensor, sample by sample; read where it waits."""

    def __init__(self, walk: SlicedRun, value: ir.Value) -> None:
        self._walk, self._value = walk, value

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
        return self._walk.value(index % len(self), self._value)


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

    def quantized_outputs(self) -> Iterator[NumpyArray]:
        """What it gives in the quantized model now, before its activation, sample by sample."""
        return self._walk.peek(self._output)


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
    wanted = {layer: [*([layer.data] if float_inputs else []), layer.twin.outputs[0]] for layer in layers}
    goals = [value for values in wanted.values() for value in values]
    reference = SlicedRun(quantized.reference, data, count, store, goals)
    left = [*goals, *reads.values()]
    for layer in progress(layers, "layers", len(layers), name=lambda layer: layer.name):
        data.check_time()
        mine = [(quantized_run, reads[layer]), *((reference, value) for value in wanted[layer])]
        for run, value in mine:
            run.reach(value)
        inputs, *before, outputs = (Column(run, value) for run, value in mine)
        yield Visit(layer, inputs, before[0] if before else (), outputs, quantized_run, quantized.output_of(layer))
        for run, value in mine:
            left.remove(value)
            if value not in left:
                run.release(value)
