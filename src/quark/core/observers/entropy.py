"""Entropy: the range that loses least information, KL(P || Q) (TensorRT's calibration, as in ONNX Runtime).

|x| of the values other than 0 is spread over 2048 equal bins. For each candidate end i, P is the first i bins with the
tail added to the last, Q is P quantized to the levels of the type and spread back over P's occupied bins; the i with
the least KL wins.
"""

from __future__ import annotations

import numpy as np

from quark.core.observers.bit_histogram import Bins, Floats, absolute
from quark.core.observers.histogram_based import HistogramBasedObserver

BINS = 2048


class EntropyObserver(HistogramBasedObserver):
    """Least Kullback-Leibler divergence between the float and the quantized distribution; per tensor."""

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        amax = max(-low, high)
        if amax == 0:
            return low, high
        counts = uniform(_without_zeros(absolute(bins)), amax)
        levels = 1 << (min(self.spec.dtype.bits, 8) - 1)
        ends = range(BINS, levels - 1, -(BINS // 512))[::-1]
        divergences = [_divergence(counts, end, levels) for end in ends]
        edge = ends[int(np.argmin(divergences))] / BINS * amax
        return max(low, -edge), min(high, edge)


def _without_zeros(bins: Bins) -> Bins:
    """The bins of values other than 0, which every quantized type holds exactly: after a Relu they would drown the
    rest.
    """
    kept = bins.right > np.finfo(np.float32).tiny
    return Bins(bins.left[kept], bins.right[kept], bins.count[kept])


def uniform(bins: Bins, amax: float) -> Floats:
    """Spread bins of |x| over BINS equal bins of [0, amax], each bin's counts evenly over its width."""
    edges = np.linspace(0, amax, BINS + 1)
    width = np.maximum(bins.right - bins.left, amax * 1e-12)
    # Each bin fills [left, left + width] evenly: the cumulative count is the integral of the sum of these boxes.
    ends = np.concatenate([bins.left, bins.left + width])
    density = bins.count / width
    order = np.argsort(ends, kind="stable")
    ends, slopes = ends[order], np.cumsum(np.concatenate([density, -density])[order])
    at_ends = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(ends))])
    cumulative = np.interp(edges, ends, at_ends)
    cumulative[-1] = bins.count.sum()
    return np.diff(cumulative)


def _divergence(counts: Floats, end: int, levels: int) -> float:
    p = counts[:end].copy()
    p[-1] += counts[end:].sum()
    occupied = p > 0
    group = np.minimum(np.arange(end) * levels // end, levels - 1)
    sums = np.bincount(group, weights=counts[:end], minlength=levels)
    used = np.bincount(group, weights=occupied, minlength=levels)
    q = np.where(occupied, sums[group] / np.maximum(used[group], 1), 0)
    if q.sum() == 0:
        return np.inf
    p, q = p / p.sum(), q / q.sum()
    both = p > 0
    return float((p[both] * np.log(p[both] / np.maximum(q[both], 1e-12))).sum())
