"""Scales under importance: they minimise the weighted square error of the values, not their range.

    (low, high)* = argmin over a, b of sum_i h_i (w_i - Q_[a low, b high](w_i))^2    for each part with one scale

h_i is the importance of input channel i: the second moment of what it carries (the diagonal of X^T X), or the inverse
of the variance left when the channels after it may make up for it (GPTQ: 1 / U_ii^2). The grid of a and b is searched
coarse to fine; it holds (1, 1), so the error is never above that of the full range.

A scale that is itself a narrow float has few neighbours, and those of block floats are all tried:

    E8M0          half, all and twice of the rule's
    E4M3, E5M3    all from half of the rule's to 13/8 of it: 3/2 puts the largest value at 4 where the rule puts it at 6
                  (Four Over Six, Cook et al. 2025, arXiv:2512.02010), for between 4 and 6 FP4 has no value
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from quark.core.array import Array, astype, chunk_bytes_for, dtype_name, namespace, on_cpu
from quark.core.blocks.block_types import BlockType
from quark.core.granularity import PerChannel, PerGroup
from quark.core.quantize import block_qparams, effective, fake_quantize, quantize_scales, range_of, second_level
from quark.core.scales import SCALE_DTYPES, QParams, qparams_from_range
from quark.core.solvers.columns.columns import compiles, part_errors
from quark.core.spec import ScaleType, TensorSpec

_COARSE = (0.9, 0.8, 0.7, 0.6, 0.5)
"""Shares of the range that are tried first, beside 1, the same for both ends."""
_FINE = 0.05
"""Step of the second round, around the best of the first; each end of an asymmetric range moves by twice as much."""
_BINADES = (0.5, 2.0)
"""Factors on an E8M0 scale, the neighbours of which are its half and its double."""
_NEIGHBOURS = tuple(share / 32 for share in (*range(16, 32), *range(34, 53, 2)))
"""Factors on a scale with a mantissa of 3 bits, which hold each of its neighbours between the first and the last: steps
of a scale are a sixteenth of it at least."""
SMALL = 1 << 22
"""Bytes of the copies of a weight, one for each candidate, that a CPU works on at once."""
ROUNDING = 1e-5
"""Share of the error that sums in another order (over batches, over processes) may change: no reason to choose."""


def weighted_qparams(weight: Array, importance: Array, spec: TensorSpec, second: QParams | None = None) -> QParams:
    """Scale and zero point of a weight that lose least under `importance`.

    Args:
        weight: Any float array.
        importance: Non-negative, broadcasts against the weight: (in_features,) for a linear layer.
        spec: What the weight is quantized to; its observer has no part in it.
        second: The second-level scale, where it is shared with other weights.
    """
    if isinstance(spec.dtype, BlockType):
        return block_qparams(weight, importance, spec)
    return _Search(weight, importance, spec, second).solve()


class _Search:
    def __init__(self, weight: Array, importance: Array, spec: TensorSpec, second: QParams | None) -> None:
        self.weight, self.importance, self.spec = weight, importance, spec
        self.values = astype(weight, "float32")
        self.low, self.high = range_of(weight, spec)
        self.runs = _runs(spec, tuple(weight.shape)) if spec.code_spec is None else None
        self.one_sided = spec.symmetric or not spec.has_zero_point
        self.second = second or second_level(self._first(self.low, self.high), weight, spec).second

    def solve(self) -> QParams:
        xp = namespace(self.low)
        a = b = xp.ones_like(self.low)
        best = self._error(a, b)
        neighbours = _neighbours(self.spec)
        shares = neighbours or _COARSE
        for share, error in zip(shares, self._errors(shares), strict=True):
            both = xp.full_like(a, share)
            a, b, best = self._chosen(both, both, error, a, b, best)
        for by in () if neighbours else (-_FINE, _FINE):
            a, b, best = self._better(a + by, b + by, a, b, best)
        if not self.one_sided:
            for by in (-2 * _FINE, 2 * _FINE):
                a, b, best = self._better(a + by, b, a, b, best)
                a, b, best = self._better(a, b + by, a, b, best)
        return self._params(a, b)

    def _better(self, p: Array, q: Array, a: Array, b: Array, best: Array) -> tuple[Array, Array, Array]:
        """(p, q) where they lose less than (a, b), by more than rounding, and the error then."""
        return self._chosen(p, q, self._error(p, q), a, b, best)

    @staticmethod
    def _chosen(p: Array, q: Array, error: Array, a: Array, b: Array, best: Array) -> tuple[Array, Array, Array]:
        """(p, q) where their error is less than `best`, that of (a, b), by more than rounding; and the error then."""
        xp = namespace(best)
        better = error < best * (1 - ROUNDING)
        return xp.where(better, p, a), xp.where(better, q, b), xp.where(better, error, best)

    def _first(self, low: Array, high: Array) -> QParams:
        return qparams_from_range(low, high, self.spec, dtype_name(self.weight))

    def _params(self, a: Array, b: Array) -> QParams:
        return self._within(self.low * a, self.high * b)

    def _within(self, low: Array, high: Array) -> QParams:
        first = self._first(low, high)
        if self.spec.code_spec is not None:  # the second level follows from the codes of the first
            return second_level(first, self.weight, self.spec)
        return quantize_scales(first, self.second, self.spec)

    def _errors(self, shares: tuple[float, ...]) -> Iterator[Array]:
        """Yield the losses under shares of the whole range, each as `_error` has it; of a small weight on a device
        all at once, as rows below each other, for each candidate would take some forty launches.
        """
        # All at once where their rows have scales of their own, and no compiled code takes one after the other.
        one_second = self.second is None or math.prod(self.second.scale.shape) == 1
        most = SMALL if on_cpu(self.values) else chunk_bytes_for(self.values)
        fits = one_second and 4 * math.prod(self.values.shape) * len(shares) <= most
        if self.runs is None or not fits or (on_cpu(self.values) and compiles(self.spec)):
            for share in shares:
                both = namespace(self.low).full_like(self.low, share)
                yield self._error(both, both)
            return
        concatenate = namespace(self.low).concatenate
        low, high = (concatenate([side * share for share in shares]) for side in (self.low, self.high))
        importance, rows = self.importance, len(self.values)
        if importance.ndim == 2 and len(importance) == rows:
            importance = concatenate([importance] * len(shares))
        errors = self._lost(self._within(low, high), concatenate([self.values] * len(shares)), importance)
        yield from (errors[start : start + rows] for start in range(0, len(errors), rows))

    def _error(self, a: Array, b: Array) -> Array:
        """The weighted square error of each part, in the shape of the scale."""
        params, spec = self._params(a, b), replace(self.spec, dynamic=False)
        if self.runs is not None:
            scale = effective(params, spec).scale
            errors = part_errors(self.values, self.importance, scale, params.zero_point, spec, self.runs)
            if errors is not None:
                return errors
        return self._lost(params, self.values, self.importance)

    def _lost(self, params: QParams, values: Array, importance: Array) -> Array:
        """The weighted square error of each part of some rows under their scales."""
        y = fake_quantize(values, params, replace(self.spec, dynamic=False))
        y -= values
        y *= y
        y *= importance
        return self.spec.split.sums(y)


def _neighbours(spec: TensorSpec) -> tuple[float, ...]:
    """The factors that reach the neighbours of a scale of a narrow type; none where scales are finer, or steps."""
    if not spec.dtype.is_float:
        return ()
    if spec.scale_type is ScaleType.float8_e8m0fnu:
        return _BINADES
    named = SCALE_DTYPES.get(spec.scale_type) if spec.scale_spec is None else spec.scale_spec.dtype.name
    return _NEIGHBOURS if named in ("fp8_e4m3", "fp8_e5m3") else ()


def _runs(spec: TensorSpec, shape: tuple[int, ...]) -> int | None:
    """Neighbouring values that share a scale, where every scale has a run of a row; else None."""
    split = spec.split
    if len(shape) != 2:
        return None
    if isinstance(split, PerChannel) and split.axis % 2 == 0:
        return shape[1]
    if isinstance(split, PerGroup) and split.axis in (-1, 1) and shape[1] % max(split.size, 1) == 0:
        return split.split(shape[1])[1]
    return None
