"""KL-J: the threshold of least Jeffreys divergence, where TQT starts that of an activation (arXiv:1903.08066).

With F the cumulative distribution of |x| over equal bins, and G that of |x| cut at a candidate edge and spread over
the levels of the type (linear between them, 1 beyond the edge; Settle et al. 2018, arXiv:1805.07941, algorithm 1):

    J = sum (F - G) log(F / G)       over the bins where F > 0
"""

from __future__ import annotations

import numpy as np

from quark.core.observers.entropy import BINS
from quark.core.observers.histograms.base import HistogramBasedObserver
from quark.core.observers.histograms.bit_histogram import Bins, Floats, absolute, uniform

CANDIDATES = 512


class JeffreysObserver(HistogramBasedObserver):
    """Least symmetric divergence between the float and the quantized cumulative distribution; per tensor."""

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        amax = max(-low, high)
        if amax == 0:
            return low, high
        levels = 1 << (min(self.spec.dtype.bits, 8) - 1)
        cumulative = np.cumsum(uniform(absolute(bins), 0.0, amax, BINS))
        cumulative /= cumulative[-1]
        ends = range(BINS, levels, -(BINS // CANDIDATES))[::-1]
        edge = ends[int(np.argmin([divergence(cumulative, end, levels) for end in ends]))] / BINS * amax
        return max(low, -edge), min(high, edge)


def divergence(cumulative: Floats, end: int, levels: int) -> float:
    """J of cutting after `end` bins and keeping `levels` points of what is left."""
    inside = cumulative[:end].copy()
    inside[-1] = 1.0
    bins, points = np.linspace(0, 1, end), np.linspace(0, 1, levels)
    quantized = np.ones_like(cumulative)
    quantized[:end] = np.interp(bins, points, np.interp(points, bins, inside))
    seen = (cumulative > 0) & (quantized > 0)
    f, g = cumulative[seen], quantized[seen]
    return float(((f - g) * np.log(f / g)).sum())
