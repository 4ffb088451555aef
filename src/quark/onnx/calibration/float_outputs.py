"""The outputs of a float model for some samples, and what other models give for the same samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import onnx_ir as ir
import onnxruntime

from quark.core.array import NumpyArray
from quark.onnx.calibration.data.own_time import own_time
from quark.onnx.calibration.data.padding import Padding
from quark.onnx.calibration.data.samples import Samples, Store
from quark.onnx.graph.sessions import run_sample

OpenSession = Callable[[ir.Model], AbstractContextManager[onnxruntime.InferenceSession]]


def _where_finite(expected: NumpyArray, array: NumpyArray) -> tuple[NumpyArray, NumpyArray]:
    """A float output and another, both 0 where the float one is NaN or infinite: there is nothing to be near to."""
    if expected.shape != array.shape or expected.dtype.kind != "f":
        return expected, array
    finite = np.isfinite(expected)
    return (expected, array) if finite.all() else (np.where(finite, expected, 0), np.where(finite, array, 0))


class FloatOutputs:
    """Runs the float model once; any number of models is then compared with what it gave, at positions that are real.

    Args:
        model: The float model.
        names: The outputs that are compared.
        data: The samples.
        open_session: How a model is run, the float one too.
        count: How many of the samples, from the first; None for all.
        folder: Where outputs go that memory does not hold; None for the system's temporary folder.
        given: (sample, name) -> an output, if the model ran elsewhere.

    Attributes:
        forward_seconds: What the fastest sample took; the first counts the session, too.
    """

    def __init__(
        self,
        model: ir.Model,
        names: Sequence[str],
        data: Samples,
        open_session: OpenSession,
        count: int | None = None,
        folder: str | None = None,
        given: Store | None = None,
    ) -> None:
        self.names, self._data, self._open_session = names, data, open_session
        self._count = len(data) if count is None else min(count, len(data))
        self._store, self._padding = Store(folder=folder) if given is None else given, Padding.of(model)
        self.forward_seconds, start = math.inf, own_time()
        for sample, arrays in enumerate(() if given is not None else self._run(model, range(self._count))):
            self.forward_seconds = min(self.forward_seconds, own_time() - start)
            for name, array in zip(names, arrays, strict=True):
                self._store[sample, name] = array
            start = own_time()

    def __len__(self) -> int:
        """How many samples there are."""
        return self._count

    def arrays(self, name: str) -> Iterator[NumpyArray]:
        """An output of the float model, of each sample; 0 where it is not finite."""
        for sample in range(self._count):
            array = self._store[sample, name]
            yield _where_finite(array, array)[0]

    def beside(self, model: ir.Model, samples: range | None = None) -> Iterator[list[tuple[NumpyArray, NumpyArray]]]:
        """Of each sample, or of some, for each output, the float one and that of another model."""
        samples = range(self._count) if samples is None else samples
        yield from self.paired(self._run(model, samples), samples.start)

    def paired(
        self, outputs: Iterable[Sequence[NumpyArray]], first: int = 0
    ) -> Iterator[list[tuple[NumpyArray, NumpyArray]]]:
        """Of each sample and output the float array and that of `outputs`, which are of samples from `first` on."""
        for sample, arrays in enumerate(outputs, first):
            pairs = [(self._store[sample, name], array) for name, array in zip(self.names, arrays, strict=True)]
            if self._padding.masks:
                feed = self._data[sample]
                pairs = [
                    tuple(self._padding.at_real(feed, (a, b))) if np.shape(a) == np.shape(b) else (a, b)
                    for a, b in pairs
                ]
            yield [_where_finite(*pair) for pair in pairs]

    def _run(self, model: ir.Model, samples: range) -> Iterator[list[NumpyArray]]:
        with self._open_session(model) as session:
            for sample in samples[: self._count]:
                yield run_sample(session, self.names, self._data[sample])
