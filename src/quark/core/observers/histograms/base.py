"""Base of the observers that solve their range from one per-tensor BitHistogram."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from quark.core.array import Array, NumpyArray, is_torch
from quark.core.observers.base import Observer, needed
from quark.core.observers.histograms.bit_histogram import Bins, BitHistogram, Floats
from quark.core.quantize import dequantize, quantize
from quark.core.scales import qparams_from_range
from quark.core.spec import TensorSpec

SAMPLES = 8
"""Most points that stand for the values of one bin when an error is summed."""


class HistogramBasedObserver(Observer):
    """Counts every value once; `solve` turns the bins into a range."""

    per_tensor_only: ClassVar[bool] = True

    def __init__(self, spec: TensorSpec) -> None:
        super().__init__(spec)
        self.histogram = BitHistogram()
        self._ends: tuple[float, float] | None = None

    def update(self, x: Array) -> None:
        if 0 in x.shape:
            return
        if is_torch(x):
            super().update(x)
            self.histogram.update(x.reshape(1, -1))
        else:
            low, high = self.histogram.update_values(x)
            self._saw(x, np.asarray(low), np.asarray(high))

    def merge(self, other: Observer) -> None:
        super().merge(other)
        assert isinstance(other, HistogramBasedObserver)
        self.histogram.merge(other.histogram)

    def state(self) -> dict[str, Array]:
        return {**super().state(), "counts": self.histogram.counts}

    def restore(self, state: Mapping[str, Array]) -> None:
        super().restore(state)
        self.histogram.counts = needed(state, "counts", self) + 0

    def solved_from(self) -> list[Array]:
        return [self.low, self.high, self.histogram.counts] if self.low is not None else []

    def solve_from(self, arrays: Sequence[NumpyArray]) -> None:
        low, high, self.histogram.counts = arrays
        self._ends = float(low), float(high)

    def range(self) -> tuple[Array, Array]:
        low, high = self._ends or (float(end) for end in self.extremes())
        if not (math.isfinite(low) and math.isfinite(high)):
            self.extremes()  # says so; on a device, later
            return self._as_range(0.0, 0.0)
        return self._as_range(*self.solve(self.histogram.bins(0, low, high), low, high))

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        """The range to quantize, from the bins and the exact extremes."""
        raise NotImplementedError


def squared_error(bins: Bins, low: Floats, high: Floats, spec: TensorSpec) -> Floats:
    """Sum of the squared quantization errors of the values for candidate ranges; see `quantization_error`."""
    return quantization_error(bins, low, high, spec, 2)


def quantization_error(bins: Bins, low: Floats, high: Floats, spec: TensorSpec, power: int) -> Floats:
    """Expected sum of |x - Q(x)|^power of the values for candidate ranges.

    Args:
        bins: The values.
        low, high: Candidate ranges, shape (candidates,).
        spec: Its dtype and symmetry decide the grid.
        power: 1 or 2.

    Returns:
        Sums over all values, shape (candidates,).
    """
    x, weight = _points(bins, float(np.maximum(-low, high).max()) / 2**spec.dtype.bits)
    errors = np.empty(len(low))
    for i in range(len(low)):
        params = qparams_from_range(np.asarray(low[i], np.float32), np.asarray(high[i], np.float32), spec)
        y = dequantize(quantize(x, params, spec), params, spec)
        errors[i] = float((weight * np.abs(y.astype(np.float64) - x) ** power).sum())
    return errors


def _points(bins: Bins, step: float) -> tuple[Floats, Floats]:
    """Values that stand for the bins, and how many each stands for: the more, the wider a bin is in steps."""
    width = bins.right - bins.left
    points = np.clip(np.ceil(SAMPLES * width / max(step, np.finfo(np.float64).tiny)), 1, SAMPLES).astype(np.int64)
    first = np.cumsum(points) - points
    inside = (np.arange(points.sum()) - np.repeat(first, points) + 0.5) / np.repeat(points, points)
    x = np.repeat(bins.left, points) + inside * np.repeat(width, points)
    return x.astype(np.float32), np.repeat(bins.count / points, points)
