"""Distribution: the range mean +- k * std, k chosen for the bits (ACIQ, Banner et al. 2019, arXiv:1810.05723).

For a normal distribution cut at k standard deviations and quantized to 2^b levels, the expected squared error is
about k^2 / (3 * 4^b) + 2 * [(1 + k^2) * Q(k) - k * phi(k)]; k is its minimum. Nothing but mean and deviation counts,
so a few outliers hardly move the range. (ONNX Runtime's method of this name exists for float8 only.)
"""

from __future__ import annotations

import math

import numpy as np

from quark.core.observers.histograms.base import HistogramBasedObserver
from quark.core.observers.histograms.bit_histogram import Bins


class DistributionObserver(HistogramBasedObserver):
    """Mean and deviation times the best clipping of a normal distribution; per tensor."""

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        center = (bins.left + bins.right) / 2
        mean = float(np.average(center, weights=bins.count))
        reach = best_clip(self.spec.dtype.bits) * math.sqrt(float(np.average((center - mean) ** 2, weights=bins.count)))
        if self.spec.symmetric or self.spec.dtype.is_float:
            edge = min(max(-low, high), abs(mean) + reach)
            return -edge, edge
        return max(low, mean - reach), min(high, mean + reach)


def best_clip(bits: int) -> float:
    """The k of the least expected error, for `bits` bits."""
    candidates = np.arange(0.5, 12, 0.001)
    density = np.exp(-(candidates**2) / 2) / math.sqrt(2 * math.pi)
    tail = np.array([math.erfc(k / math.sqrt(2)) / 2 for k in candidates])
    errors = candidates**2 / (3 * 4.0**bits) + 2 * ((1 + candidates**2) * tail - candidates * density)
    return float(candidates[int(np.argmin(errors))])
