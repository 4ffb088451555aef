"""Three sigma: |mean| + 3 std, where TQT starts the threshold of a weight (Jain et al. 2019, arXiv:1903.08066)."""

from __future__ import annotations

import math

import numpy as np

from quark.core.observers.histograms.base import HistogramBasedObserver
from quark.core.observers.histograms.bit_histogram import Bins


class ThreeSigmaObserver(HistogramBasedObserver):
    """Mean and deviation of all values; per tensor."""

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        center = (bins.left + bins.right) / 2
        mean = float(np.average(center, weights=bins.count))
        edge = abs(mean) + 3 * math.sqrt(float(np.average((center - mean) ** 2, weights=bins.count)))
        return max(low, -edge), min(high, edge)
