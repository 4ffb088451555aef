"""MSE: the range [a * min, a * max] whose quantization error sum (x - Q(x))^2 is least, 0 < a <= 1.

One hundred shrink factors a = 1, 0.99, ... are scored on the histogram.
"""

from __future__ import annotations

import numpy as np

from quark.core.observers.histograms.base import HistogramBasedObserver, squared_error
from quark.core.observers.histograms.bit_histogram import Bins


class MSEObserver(HistogramBasedObserver):
    """Least squared error over ranges shrunk by one factor; per tensor."""

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        factors = np.arange(100, 0, -1) / 100
        best = factors[int(np.argmin(squared_error(bins, factors * low, factors * high, self.spec)))]
        return float(best * low), float(best * high)
