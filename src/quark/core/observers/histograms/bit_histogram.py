"""BitHistogram: counts of values by the upper bits of their float32 pattern.

bin(x) = pattern(x) >> shift: sign, exponent and the first mantissa bits, so bins are relative (2^-7 of the value for
16 bits) and cover every float from the start: no range is guessed, nothing is ever rebinned, merging is adding.
One pass over each tensor, compiled where this machine can, else by numpy; both give the same. The compiled one takes a
third of the time and lets other threads run meanwhile. Percentile, MSE, histogram and entropy read it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

import numpy as np

from quark.base import native
from quark.core.array import Array, NumpyArray, astype, namespace, on_cpu, to_numpy, view

Counts = np.ndarray[tuple[int], np.dtype[np.int64]]
Extremes = tuple[np.float32, np.float32]
BITS = 16
WORTH_COMPILING = 1 << 15
"""A tensor of so many values comes from a real model, which is worth a second of compiling, once on a machine."""


def count_patterns(x: np.ndarray[Any, np.dtype[np.float32]], counts: Counts) -> Extremes:
    """Add the counts of the values of x to `counts`, shape (65536,).

    Bin i holds the patterns whose upper half is i - 32768 as int16.

    Returns:
        Smallest and largest value; NaN where there is one. x must not be empty.
    """
    values = np.ascontiguousarray(x).reshape(-1)
    function = _compiled() if values.size >= WORTH_COMPILING or _compiled.cache_info().currsize else None
    if function is None:
        return count_with_numpy(values, counts)
    extremes = np.empty(2, np.float32)
    function(values.ctypes.data, values.size, counts.ctypes.data, extremes.ctypes.data)
    return extremes[0], extremes[1]


def count_with_numpy(values: np.ndarray[Any, np.dtype[np.float32]], counts: Counts) -> Extremes:
    """Add the counts of values to `counts` without a compiler; smallest and largest value."""
    half = np.bincount(values.view(np.uint32) >> BITS, minlength=1 << BITS)
    counts += np.roll(half, 1 << (BITS - 1))
    return values.min(), values.max()


@cache
def _compiled() -> Any:
    """The compiled function, or None where it cannot be built."""
    source = Path(__file__).with_name("counts.cpp")
    library: Any = native.loaded(source, "the counter of histograms", "numpy counts too.")
    if library is None:
        return None
    function = library.count_patterns
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = None
    return function


Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Bins:
    """The occupied bins in ascending order of value: bounds [left, right] and counts; float64."""

    left: Floats
    right: Floats
    count: Floats


class BitHistogram:
    """Counters for `rows` tensors (1, or one for each channel) at `bits` bits of the pattern."""

    def __init__(self, rows: int = 1, bits: int = 16) -> None:
        self.rows, self.bits = rows, bits
        self.counts: Array | None = None

    def update(self, x: Array) -> None:
        """Count the values of x, shape (rows, n)."""
        patterns = view(astype(x, "float32"), "int32") >> (32 - self.bits)
        index = patterns + (1 << (self.bits - 1))
        if self.rows > 1:
            xp = namespace(x)  # counted on the device: a copy from the host would wait for it
            rows = astype(xp.cumsum(xp.ones_like(index[:, :1]), 0) - 1, "int32")
            index = index + (rows << self.bits)
        index, size, xp = index.reshape(-1), self.rows << self.bits, namespace(x)
        if on_cpu(x):
            counts = xp.bincount(index, minlength=size)
        else:  # on a device bincount asks for the largest number first, and waits for it
            one = index.new_ones((), dtype=xp.int64)
            counts = one.new_zeros(size).scatter_add_(0, index.long(), one.expand_as(index))
        self.counts = counts if self.counts is None else self.counts + counts

    def update_values(self, x: np.ndarray[Any, Any]) -> Extremes:
        """Count the values of one numpy tensor in one pass, and return its smallest and largest value."""
        if self.counts is None:
            # Pages of their own take no memory before something is counted in them: values lie in few of the exponents,
            # and memory that was used before would be cleared, and so taken.
            self.counts = np.frombuffer(mmap(-1, 8 << BITS, access=ACCESS_COPY), np.int64)
        return count_patterns(astype(x, "float32"), self.counts)

    def merge(self, other: BitHistogram) -> None:
        """Add the counts of another histogram of the same size."""
        if other.counts is not None:
            self.counts = other.counts + 0 if self.counts is None else self.counts + other.counts

    def bins(self, row: int, low: float, high: float) -> Bins:
        """The occupied bins of one row, their bounds cut to the exact extremes [low, high]."""
        assert self.counts is not None
        size = 1 << self.bits
        counts = to_numpy(self.counts[row * size : (row + 1) * size]).astype(np.float64)
        index = np.flatnonzero(counts)
        left, right = _edges(index, self.bits)
        order = np.argsort(left + right, kind="stable")
        left, right = np.clip(left[order], low, high), np.clip(right[order], low, high)
        return Bins(left, right, counts[index][order])


def every_bin(bits: int) -> NumpyArray:
    """Both bounds of each bin, (2, bins); 0 where they are no numbers."""
    with np.errstate(invalid="ignore"):
        edges = np.stack(_edges(np.arange(1 << bits), bits))
    return np.where(np.isfinite(edges).all(0), edges, 0.0)


def _edges(index: NumpyArray, bits: int) -> tuple[Floats, Floats]:
    """Bounds of bins by their numbers."""
    patterns = ((index - (1 << bits) // 2) << (32 - bits)).astype(np.int64)
    near, far = _as_float(patterns), _as_float(patterns | ((1 << (32 - bits)) - 1))
    return np.minimum(near, far), np.maximum(near, far)


def absolute(bins: Bins) -> Bins:
    """The bins of |x|."""
    left = np.where(bins.left < 0, -bins.right, bins.left)
    right = np.where(bins.left < 0, -bins.left, bins.right)
    order = np.argsort(left + right, kind="stable")
    return Bins(left[order], right[order], bins.count[order])


def quantile(bins: Bins, q: float) -> float:
    """The value below which a share q of the counts lies, linear within a bin."""
    if q >= 1:
        return float(bins.right[-1])
    cumulative = np.cumsum(bins.count)
    target = q * cumulative[-1]
    i = int(np.searchsorted(cumulative, target))
    inside = 1 - (cumulative[i] - target) / bins.count[i]
    return float(bins.left[i] + inside * (bins.right[i] - bins.left[i]))


def uniform(bins: Bins, low: float, high: float, size: int) -> Floats:
    """Spread bins over `size` equal bins of [low, high], each bin's counts evenly over its width."""
    edges = np.linspace(low, high, size + 1)
    width = np.maximum(bins.right - bins.left, (high - low) * 1e-12)
    # Each bin fills [left, left + width] evenly: the cumulative count is the integral of the sum of these boxes.
    ends = np.concatenate([bins.left, bins.left + width])
    density = bins.count / width
    order = np.argsort(ends, kind="stable")
    ends, slopes = ends[order], np.cumsum(np.concatenate([density, -density])[order])
    at_ends = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(ends))])
    cumulative = np.interp(edges, ends, at_ends)
    cumulative[-1] = bins.count.sum()
    return np.diff(cumulative)


def _as_float(patterns: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Floats:
    with np.errstate(invalid="ignore"):
        return (patterns & 0xFFFFFFFF).astype(np.uint32).view(np.float32).astype(np.float64)
