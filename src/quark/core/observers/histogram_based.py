"""Base of the observers that solve their range from one per-tensor BitHistogram."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from quark.core.array import Array
from quark.core.observers.base import Observer
from quark.core.observers.bit_histogram import Bins, BitHistogram, Floats
from quark.core.quantize import dequantize, quantize
from quark.core.scales import qparams_from_range
from quark.core.spec import TensorSpec

SAMPLES = 8
"""Points that stand for the values of one bin when an error is summed."""


class HistogramBasedObserver(Observer):
    """Counts every value once; `solve` turns the bins into a range."""

    per_tensor_only: ClassVar[bool] = True

    def __init__(self, spec: TensorSpec) -> None:
        super().__init__(spec)
        self.histogram = BitHistogram()

    def update(self, x: Array) -> None:
        if 0 in x.shape:
            return
        super().update(x)
        self.histogram.update(x.reshape(1, -1))

    def merge(self, other: Observer) -> None:
        super().merge(other)
        assert isinstance(other, HistogramBasedObserver)
        self.histogram.merge(other.histogram)

    def range(self) -> tuple[Array, Array]:
        low, high = self._scalars()
        return self._as_range(*self.solve(self.histogram.bins(0, low, high), low, high))

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        """The range to quantize, from the bins and the exact extremes."""
        raise NotImplementedError


def squared_error(bins: Bins, low: Floats, high: Floats, spec: TensorSpec) -> Floats:
    """Expected squared quantization error of the values for candidate ranges.

    Args:
        bins: The values.
        low, high: Candidate ranges, shape (candidates,).
        spec: Its dtype and symmetry decide the grid.

    Returns:
        Sums over all values, shape (candidates,).
    """
    points = (np.arange(SAMPLES) + 0.5) / SAMPLES
    x = (bins.left[:, None] + points * (bins.right - bins.left)[:, None]).astype(np.float32).reshape(-1)
    weight = np.repeat(bins.count / SAMPLES, SAMPLES)
    errors = np.empty(len(low))
    for i in range(len(low)):
        params = qparams_from_range(np.asarray(low[i], np.float32), np.asarray(high[i], np.float32), spec)
        y = dequantize(quantize(x, params, spec), params, spec)
        errors[i] = float((weight * (y.astype(np.float64) - x) ** 2).sum())
    return errors
