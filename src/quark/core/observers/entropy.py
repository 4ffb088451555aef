"""Entropy: the range that loses least information, KL(P || Q) (TensorRT's calibration, as in ONNX Runtime).

|x| of the values other than 0 is spread over 2048 equal bins. For each candidate end i, P is the first i bins with the
tail added to the last, Q is P quantized to the levels of the type and spread back over P's occupied bins; the i with
the least KL wins.
"""

from __future__ import annotations

import numpy as np

from quark.core.observers.histograms.base import HistogramBasedObserver
from quark.core.observers.histograms.bit_histogram import Bins, Floats, absolute, uniform
from quark.core.spec import TensorSpec
from quark.errors import ConfigError

BINS = 2048


class EntropyObserver(HistogramBasedObserver):
    """Least Kullback-Leibler divergence between the float and the quantized distribution; per tensor.

    Args:
        spec: The spec of the observed tensor.
        levels: Levels that Q has for |x|, 2 to 2048; None for those of the type, 128 at most.
    """

    def __init__(self, spec: TensorSpec, levels: int | None = None) -> None:
        super().__init__(spec)
        if levels is not None and not 2 <= levels <= BINS:
            raise ConfigError(f"levels must be from 2 to {BINS}, got {levels}.")
        self.levels = 1 << (min(spec.dtype.bits, 8) - 1) if levels is None else levels

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        amax = max(-low, high)
        if amax == 0:
            return low, high
        bins = absolute(bins)
        nonzero = (
            bins.right > np.finfo(np.float32).tiny
        )  # after a Relu the bin of 0, which is exact, would drown the rest
        bins = Bins(bins.left[nonzero], bins.right[nonzero], bins.count[nonzero])
        counts = uniform(bins, 0.0, amax, BINS)
        ends = range(BINS, self.levels - 1, -(BINS // 512))[::-1]
        edge = ends[int(np.argmin(divergences(counts, np.array(ends), self.levels)))] / BINS * amax
        return max(low, -edge), min(high, edge)


def divergences(counts: Floats, ends: np.ndarray[tuple[int], np.dtype[np.int64]], levels: int) -> Floats:
    """KL(P || Q) for candidate ends, all at once: every sum over a group of bins is a difference of running sums.

    With c the counts, g the groups (one for each level), s their sums and u their occupied bins, and the tail added
    to the last bin of P:  KL = [sum p log(p / sum p) - sum over g of (mass of g) * log(s / (u * sum s))] / sum p.
    """
    running = _before(counts)
    total, inside = running[-1], running[ends]
    tail = total - inside
    bounds = -(-np.arange(levels + 1) * ends[:, None] // levels)
    sums = np.diff(running[bounds], axis=1)
    occupied = np.diff(_before(np.sign(counts))[bounds], axis=1)
    # The tail occupies the last bin, be it empty otherwise.
    occupied[:, -1] += (counts[ends - 1] == 0) & (tail > 0)
    mass = sums.copy()
    mass[:, -1] += tail
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(occupied > 0, sums / np.maximum(occupied, 1) / inside[:, None], 0)
        last = counts[ends - 1]
        entropy = _before(_xlogx(counts))[ends] - _xlogx(last) + _xlogx(last + tail) - total * np.log(total)
        cross = np.where(mass > 0, mass * np.log(np.maximum(q, 1e-12)), 0).sum(axis=1)
    return np.where(inside == 0, np.inf, (entropy - cross) / total)


def _before(x: Floats) -> Floats:
    """Sums of the entries before each position, and of all."""
    return np.concatenate([[0.0], np.cumsum(x, dtype=np.float64)])


def _xlogx(x: Floats) -> Floats:
    return np.where(x > 0, x * np.log(np.maximum(x, 1e-300)), 0)
