"""Power-of-two scales: the exponent that rounds the min-max scale (MinMax), that never clips (NonOverflow), or that
has the least squared error (MinMSE).

    MinMax        scale = 2^round(log2 s)          s: the scale of the min-max range
    NonOverflow   scale = 2^ceil(log2 s)
    MinMSE        the best of 2^(round(log2 s) + k), k = -4 .. 2, on a histogram of each part

MinMSE has two variants: of the values within a percentile, and the choice of most of the tensors.

On a device, counts stay there, and errors are summed without a wait: which bins are occupied is not known, so all are
summed, each by `SAMPLES` points, of which some weigh nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from quark.core.array import (
    DEVICE_CHUNK,
    Array,
    NumpyArray,
    astype,
    copied_once,
    is_torch,
    like,
    namespace,
    on_cpu,
    row_chunks,
    to_numpy,
)
from quark.core.granularity import PerChannel, PerTensor
from quark.core.observers.base import Observer, host, needed
from quark.core.observers.histograms.base import SAMPLES, squared_error
from quark.core.observers.histograms.bit_histogram import Bins, BitHistogram, every_bin
from quark.core.observers.percentile import percentile_range
from quark.core.quantize import dequantize, quantize
from quark.core.scales import exp2, exponent, qparams_from_range
from quark.core.spec import ScaleType, TensorSpec
from quark.errors import ConfigError

CANDIDATES = range(-4, 3)
EXPONENTS = 512
"""Exponents of float32 and its scales, from -256 on."""


class PowerOfTwoMinMaxObserver(Observer):
    """Nearest power of two of the min-max scale. For every granularity."""

    def range(self) -> tuple[Array, Array]:
        return _scaled_range(*self.extremes(), self.spec, self._exponent())

    def _exponent(self) -> Array:
        """Exponent of the scale for each part, int32."""
        return self._nearest(*self.extremes())

    def _nearest(self, low: Array, high: Array) -> Array:
        return exponent(qparams_from_range(low, high, replace(self.spec, scale_type=ScaleType.pof2)).scale)


class PowerOfTwoNonOverflowObserver(PowerOfTwoMinMaxObserver):
    """Smallest power of two at which no value clips. For every granularity."""

    def _exponent(self) -> Array:
        low, high = self.extremes()
        scale = qparams_from_range(low, high, replace(self.spec, scale_type=ScaleType.float32)).scale
        below = exponent(scale)
        return namespace(scale).where(exp2(below) < scale, below + 1, below)


class PowerOfTwoMinMSEObserver(PowerOfTwoMinMaxObserver):
    """The power of two with the least squared error, per tensor or per channel."""

    def __init__(self, spec: TensorSpec) -> None:
        super().__init__(spec)
        if spec.dtype.is_block:
            raise ConfigError(f"The steps of {spec.dtype} are powers of two already; its observer is 'block'.")
        self.histogram: BitHistogram | None = None
        self._ends: tuple[NumpyArray, NumpyArray] | None = None

    def update(self, x: Array) -> None:
        if 0 in x.shape:
            return
        if isinstance(self.spec.split, PerTensor) and not is_torch(x):
            # Extremes and counts in one pass, without copies of the tensor.
            self.histogram = self.histogram or BitHistogram()
            low, high = self.histogram.update_values(x)
            self._saw(x, np.asarray(low), np.asarray(high))
            return
        super().update(x)
        # Of shape (parts, values of a part); the values of a part share a scale.
        split = self.spec.split
        blocks, shared = split.blocks(x), split.axes(x.ndim)
        own = [axis for axis in range(blocks.ndim) if axis not in shared]
        parts = namespace(x).moveaxis(blocks, own, list(range(len(own))))
        parts = parts.reshape(math.prod(parts.shape[: len(own)]), -1)
        if self.histogram is None:
            # 65,536 counters for each of up to 64 channels; fewer, at least 4,096, for each of more.
            bits = min(16, max(12, 22 - (parts.shape[0] - 1).bit_length()))
            self.histogram = BitHistogram(parts.shape[0], bits)
        self.histogram.update(parts)

    def merge(self, other: Observer) -> None:
        super().merge(other)
        if isinstance(other, PowerOfTwoMinMSEObserver) and other.histogram is not None:
            if self.histogram is None:
                self.histogram = BitHistogram(other.histogram.rows, other.histogram.bits)
            self.histogram.merge(other.histogram)

    def state(self) -> dict[str, Array]:
        return {**super().state(), "counts": None if self.histogram is None else self.histogram.counts}

    def restore(self, state: Mapping[str, Array]) -> None:
        super().restore(state)
        counts, rows = needed(state, "counts", self), math.prod(state["low"].shape)
        self.histogram = BitHistogram(rows, (len(counts) // rows).bit_length() - 1)
        self.histogram.counts = counts + 0

    def _exponent(self) -> Array:
        low, high = self.extremes()
        assert self.histogram is not None
        ends = self._ends or (to_numpy(low), to_numpy(high))
        center = self._nearest(*ends)
        best = center.reshape(-1).astype(np.int32)
        lows, highs = (side.astype(np.float64).reshape(-1) for side in ends)
        if not (np.isfinite(lows).all() and np.isfinite(highs).all()):
            return like(center, low, "int32")  # that it is wrong is said later, where a device is asked
        for row in range(self.histogram.rows):
            bins = self.histogram.bins(row, lows[row], highs[row])
            best[row] = self._best(bins, lows[row], highs[row], best[row])
        return like(best.reshape(tuple(center.shape)), low, "int32")

    def solved_from(self) -> list[Array]:
        return [] if self.histogram is None else [self.low, self.high, self.histogram.counts]

    def solve_from(self, arrays: Sequence[NumpyArray]) -> None:
        assert self.histogram is not None
        low, high, self.histogram.counts = arrays
        self._ends = low, high

    def _best(self, bins: Bins, low: float, high: float, center: int) -> int:
        """The exponent for the values of one part."""
        scalar = replace(self.spec, granularity=PerTensor())
        tried = center + np.array(CANDIDATES, dtype=np.int32)
        lows, highs = (np.full(len(tried), side, dtype=np.float32) for side in (low, high))
        trial_low, trial_high = _scaled_range(lows, highs, scalar, tried)
        return int(tried[int(np.argmin(squared_error(bins, host(trial_low), host(trial_high), scalar)))])


class PowerOfTwoMSEPercentileObserver(PowerOfTwoMinMSEObserver):
    """The exponents of least squared error of the values within `percentile` percent: others clip, and do not count."""

    def __init__(self, spec: TensorSpec, percentile: float = 99.999) -> None:
        super().__init__(spec)
        self.percentile = percentile

    def _best(self, bins: Bins, low: float, high: float, center: int) -> int:
        low, high = percentile_range(bins, self.percentile, replace(self.spec, granularity=PerTensor()))
        kept = (bins.right >= low) & (bins.left <= high)
        bins = Bins(np.clip(bins.left[kept], low, high), np.clip(bins.right[kept], low, high), bins.count[kept])
        scalar = replace(self.spec, granularity=PerTensor(), scale_type=ScaleType.pof2)
        widest = qparams_from_range(np.asarray(low, np.float32), np.asarray(high, np.float32), scalar)
        return super()._best(bins, low, high, int(exponent(widest.scale)))


class PowerOfTwoMostCommonObserver(PowerOfTwoMinMaxObserver):
    """The power of two that is best, by squared error, for most of the tensors; of equals the smallest."""

    def __init__(self, spec: TensorSpec) -> None:
        super().__init__(spec)
        PowerOfTwoMinMSEObserver(spec)  # refuses what that refuses
        self.votes: Array | None = None  # (parts, EXPONENTS), int64, where the tensors are

    def update(self, x: Array) -> None:
        if 0 in x.shape:
            return
        super().update(x)
        one = PowerOfTwoMinMSEObserver(self.spec)
        one.update(x)
        if not on_cpu(x):
            self._vote_on_device(one)
            return
        if one.low is None or not bool(namespace(x).isfinite(one.low).all() and namespace(x).isfinite(one.high).all()):
            return  # `range` tells of it
        best = host(one._exponent()).reshape(-1).astype(np.int64)
        if self.votes is None:
            self.votes = np.zeros((len(best), EXPONENTS), np.int64)
        self.votes[np.arange(len(best)), best + EXPONENTS // 2] += 1

    def _vote_on_device(self, one: PowerOfTwoMinMSEObserver) -> None:
        """Count one vote for each part, and wait for nothing; what is not finite votes too, and `range` tells of it."""
        assert one.low is not None and one.high is not None and one.histogram is not None
        xp, low, high = namespace(one.low), one.low.reshape(-1), one.high.reshape(-1)
        scalar = replace(self.spec, granularity=PerTensor())
        center = one._nearest(one.low, one.high).reshape(-1)
        tried = xp.stack([center + step for step in CANDIDATES])
        lows, highs = (xp.stack([side] * len(tried)) for side in (low, high))
        trials = _scaled_range(lows, highs, scalar, tried)
        errors = _squared_errors(one.histogram, low, high, trials, scalar)
        best = tried.gather(0, errors.argmin(0)[None])[0].long() + EXPONENTS // 2
        if self.votes is None:
            self.votes = best.new_zeros((len(best), EXPONENTS))
        self.votes.scatter_add_(1, best[:, None], xp.ones_like(best)[:, None])

    def merge(self, other: Observer) -> None:
        super().merge(other)
        if isinstance(other, PowerOfTwoMostCommonObserver) and other.votes is not None:
            self.votes = other.votes + (0 if self.votes is None else self.votes)

    def state(self) -> dict[str, Array]:
        return {**super().state(), "votes": self.votes}

    def restore(self, state: Mapping[str, Array]) -> None:
        super().restore(state)
        self.votes = needed(state, "votes", self) + 0

    def _exponent(self) -> Array:
        low, _ = self.extremes()
        assert self.votes is not None
        best = astype(self.votes.argmax(1) - EXPONENTS // 2, "int32")
        return like(best.reshape(tuple(low.shape)), low, "int32")


def _scaled_range(low: Array, high: Array, spec: TensorSpec, e: Array) -> tuple[Array, Array]:
    """The range that makes the integer rule give the scale 2^e: as wide as the type, placed where [low, high] is."""
    xp = namespace(low)
    steps = spec.dtype.max - spec.dtype.min
    scale = exp2(e)
    if spec.dtype.is_float:
        return -scale * spec.dtype.max, scale * spec.dtype.max
    if spec.symmetric:
        return -scale * (steps / 2), scale * (steps / 2)
    # Asymmetric: keep the zero point that [low, high] asks for at this scale.
    zero = xp.clip(spec.dtype.min - xp.round(xp.clip(low, None, 0.0) / scale), spec.dtype.min, spec.dtype.max)
    return (spec.dtype.min - zero) * scale, (spec.dtype.max - zero) * scale


# Errors from counts that stay on a device -----------------------------------------------------------------------------


def _squared_errors(
    histogram: BitHistogram, low: Array, high: Array, trials: tuple[Array, Array], spec: TensorSpec
) -> Array:
    """Sum of the squared quantization errors of the values of each row, for candidate ranges: (candidates, rows).

    Args:
        histogram: The counts.
        low, high: Extremes of each row, (rows,).
        trials: Lower and upper ends of the candidates, (candidates, rows).
        spec: Its dtype and symmetry decide the grid.
    """
    xp, counts = namespace(low), histogram.counts
    assert counts is not None
    size = 1 << histogram.bits
    parts = [
        _of_rows(counts.reshape(-1, size)[rows], low[rows], high[rows], [side[:, rows] for side in trials], spec)
        for rows in row_chunks(histogram.rows, 64 * size, DEVICE_CHUNK)
    ]
    return parts[0] if len(parts) == 1 else xp.concatenate(parts, -1)


def _of_rows(counts: Array, low: Array, high: Array, trials: list[Array], spec: TensorSpec) -> Array:
    xp, bits = namespace(low), (counts.shape[-1] - 1).bit_length()
    edges = astype(copied_once(("bins", bits), lambda: every_bin(bits), low), "float64")
    low, high = (astype(side, "float64")[:, None] for side in (low, high))
    left, right = (xp.minimum(xp.maximum(side, low), high) for side in edges)
    step = astype(xp.maximum(-trials[0], trials[1]), "float64").amax(0)[:, None] / 2**spec.dtype.bits
    points = xp.clip(xp.ceil(SAMPLES * (right - left) / xp.clip(step, 2.0**-1022, None)), 1, SAMPLES)
    sample = xp.cumsum(xp.ones_like(left[:1, :1]).expand(SAMPLES, 1), 0)[:, :, None] - 1  # (samples, 1, 1)
    x = astype(left + (sample + 0.5) / points * (right - left), "float32")
    weight = xp.where(sample < points, counts / points, 0.0)
    x, weight = (part.swapaxes(0, 1).reshape(len(counts), -1) for part in (x, weight))
    rows, errors = replace(spec, granularity=PerChannel(0)), []
    for lower, upper in zip(trials[0], trials[1], strict=True):
        params = qparams_from_range(lower, upper, rows)
        y = dequantize(quantize(x, params, rows), params, rows)
        errors.append((weight * (astype(y, "float64") - astype(x, "float64")) ** 2).sum(-1))
    return xp.stack(errors)
