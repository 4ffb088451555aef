"""Histogram: the range [low, high], both ends free, with the least squared error (the search of torch's
HistogramObserver, without its rebinning).

Ends are moved by descent, both at once and then each alone, over 33 fractions of their width, then over finer ones
around the best.
"""

from __future__ import annotations

import numpy as np

from quark.core.observers.histograms.base import HistogramBasedObserver, squared_error
from quark.core.observers.histograms.bit_histogram import Bins


class HistogramObserver(HistogramBasedObserver):
    """Least squared error over both ends of the range; per tensor."""

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        if self.spec.symmetric or self.spec.dtype.is_float:
            low, high = -max(-low, high), max(-low, high)
        together, alone = [0, 1], [[0], [1]]
        moves = [together] if self.spec.symmetric or self.spec.dtype.is_float else [together, *alone]
        ends = np.array([1.0, 1.0])
        width = 1.0
        for _ in range(3):
            for sides in moves:
                trial = np.tile(ends, (33, 1))
                trial[:, sides] = np.clip(trial[:, sides] + np.linspace(-width, width, 33)[:, None], 0.01, 1.0)
                errors = squared_error(bins, trial[:, 0] * low, trial[:, 1] * high, self.spec)
                ends = trial[int(np.argmin(errors))]
            width /= 8
        return float(ends[0] * low), float(ends[1] * high)
