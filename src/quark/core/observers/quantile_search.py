"""Quantile search: ends move inwards by quantiles while the expected squared error falls (torch's HistogramObserver).

The range is divided into 256 equal bins. From the whole range on, 1e-5 of the values is cut off at the end where that
skips more bins; the search ends at the first cut that does not lower

    sum over bins of  density * integral of (distance to the centre of the grid's step)^2

for a grid of 2^bits steps over the range. It keeps more of the tails than the least squared error does, and clips what
is empty. Unlike torch's, the bins do not depend on the order of the data.
"""

from __future__ import annotations

import numpy as np

from quark.core.array import NumpyArray
from quark.core.observers.histograms.base import HistogramBasedObserver
from quark.core.observers.histograms.bit_histogram import Bins, Floats, uniform

BINS, STEP = 256, 1e-5


class QuantileSearchObserver(HistogramBasedObserver):
    """Both ends, moved by quantiles while the expected error falls; per tensor."""

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        width = (high - low) / BINS
        if not width > 0:
            return low, high
        counts = uniform(bins, low, high, BINS)
        start, end = _search(counts, width, 2**self.spec.dtype.bits)
        return low + width * start, low + width * (end + 1)


def _search(counts: Floats, width: float, steps: int) -> tuple[int, int]:
    """First and last bin of the range."""
    cumulative = np.cumsum(counts)
    alpha, beta, start, end, least = 0.0, 1.0, 0, BINS - 1, np.inf
    while alpha < beta:
        left = min(end, max(start, int(np.searchsorted(cumulative, (alpha + STEP) * cumulative[-1]))))
        # The last bin whose cumulative count is not above the share that is left.
        right = max(start, min(end, int(np.searchsorted(cumulative, (beta - STEP) * cumulative[-1], side="right")) - 1))
        if left - start > end - right:
            alpha, ends = alpha + STEP, (left, end)
        else:
            beta, ends = beta - STEP, (start, right)
        if ends == (start, end):
            continue
        error = _error(counts / width, width, *ends, steps)
        if error > least:
            break
        (start, end), least = ends, error
    return start, end


def _error(density: Floats, width: float, start: int, end: int, steps: int) -> float:
    """The expected squared error of a grid of `steps` steps over the bins from `start` to `end`."""
    step = width * (end - start + 1) / steps
    begin = (np.arange(BINS) - start) * width
    first, last = (np.clip(np.floor(side / step), 0, steps - 1) for side in (begin, begin + width))
    half = np.full(BINS, step / 2)
    whole = (last - first - 1) * _integral(-half, half)
    ends = _integral(begin - (first + 0.5) * step, half) + _integral(-half, begin + width - (last + 0.5) * step)
    return float(np.sum(density * (whole + ends)))


def _integral(low: NumpyArray, high: NumpyArray) -> NumpyArray:
    """Of x^2."""
    return np.asarray((high**3 - low**3) / 3)
