"""Histogram: the range [low, high], both ends free, with the least squared error (the search of torch's
HistogramObserver, without its rebinning).

Ends are moved by coordinate descent over 32 fractions of each side, then over 32 finer ones around the best.
"""

from __future__ import annotations

import numpy as np

from quark.core.observers.bit_histogram import Bins
from quark.core.observers.histogram_based import HistogramBasedObserver, squared_error


class HistogramObserver(HistogramBasedObserver):
    """Least squared error over both ends of the range; per tensor."""

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        if self.spec.symmetric or self.spec.dtype.is_float:
            low, high = -max(-low, high), max(-low, high)
        ends = np.array([1.0, 1.0])
        width = 1.0
        for _ in range(3):
            for side in (0, 1):
                if side == 1 and (self.spec.symmetric or self.spec.dtype.is_float):
                    ends[1] = ends[0]
                    continue
                trial = np.tile(ends, (33, 1))
                trial[:, side] = np.clip(ends[side] + np.linspace(-width, width, 33), 0.01, 1.0)
                if self.spec.symmetric or self.spec.dtype.is_float:
                    trial[:, 1] = trial[:, 0]
                errors = squared_error(bins, trial[:, 0] * low, trial[:, 1] * high, self.spec)
                ends = trial[int(np.argmin(errors))]
            width /= 8
        return float(ends[0] * low), float(ends[1] * high)
