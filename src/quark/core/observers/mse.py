"""MSE: the range [a * min, a * max] whose quantization error sum (x - Q(x))^2 is least, 0 < a <= 1.

One hundred shrink factors a = 1, 0.99, ... are scored on the histogram. Two others try fewer ranges, as the documented
modes of MinMSE do: those of four percentiles, and those that leave out up to a quarter of the width on both sides.
"""

from __future__ import annotations

import numpy as np

from quark.core.observers.histograms.base import HistogramBasedObserver, squared_error
from quark.core.observers.histograms.bit_histogram import Bins, Floats, quantile
from quark.core.spec import TensorSpec

_PERCENTILES = (99.9999, 99.999, 99.99, 99.9)
_CUTS = 256
"""Ranges that CentersMSEObserver tries: steps of a thousandth of the width."""


class MSEObserver(HistogramBasedObserver):
    """Least squared error over ranges shrunk by one factor; per tensor."""

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        factors = np.arange(100, 0, -1) / 100
        best = factors[int(np.argmin(squared_error(bins, factors * low, factors * high, self.spec)))]
        return float(best * low), float(best * high)


class PercentileMSEObserver(HistogramBasedObserver):
    """Least squared error over the ranges that keep one of `_PERCENTILES` of the values; per tensor."""

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        tails = [(1 - percentile / 100) / 2 for percentile in _PERCENTILES]
        lows, highs = (np.array([quantile(bins, q) for q in side]) for side in (tails, [1 - q for q in tails]))
        return _best(bins, lows, highs, self.spec)


class CentersMSEObserver(HistogramBasedObserver):
    """Least squared error over ranges with the same width cut off on both sides; per tensor."""

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        cut = np.arange(_CUTS) / (4 * _CUTS) * (high - low)
        return _best(bins, low + cut, high - cut, self.spec)


def _best(bins: Bins, lows: Floats, highs: Floats, spec: TensorSpec) -> tuple[float, float]:
    """The candidate with the least squared error, the widest of equals; a range has zero in it."""
    lows, highs = np.minimum(lows, 0.0), np.maximum(highs, 0.0)
    best = int(np.argmin(squared_error(bins, lows, highs, spec)))
    return float(lows[best]), float(highs[best])
