"""The scales of block types under which the weighted square error is least, found by search and least squares.

    E = sum_i h_i (x_i - s q_i + m)^2       s = d c, m = e k where there are two levels

1. Each group alone: s and m are unrounded. Trial scales map its extremes to codes near the ends of the range; under the
   codes of each, s and m follow by weighted least squares. The best trial is kept, then coded and fitted again.
2. d and e map the largest s and m of the block to the largest codes; c and k are rounded.
3. In turn, for some passes: each group tries the neighbours of its c and k, and d and e follow by least squares under
   all codes of the block (two unknowns where there are minimums). A step is kept where it loses less, with all q
   coded anew; so no step makes the error larger.

The trials are those of any such search (make_qx_quants and make_qkx2_quants of ggml-quants.c are others); step 3 is
what a block of two levels gains most from. All in float32, whole chunks of rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from quark.core.array import Array, astype, like, namespace, row_chunks
from quark.core.blocks.block_types import BlockType, block_codes, block_values
from quark.core.dtypes import DTYPES
from quark.core.rounding import round_to

CHUNK = 1 << 20
"""Bytes of a weight that are worked on at once: the search has hundreds of steps, each on all of a chunk."""
PASSES = 3
"""Rounds of step 3. A fourth gains less than 0.1 % of the error."""

_FINE_ENDS = (
    (0.0, 1.0), (0.01, 0.99), (0.0, 0.98), (0.02, 1.0), (-0.01, 1.01), (0.03, 0.97), (0.0, 0.94), (0.06, 1.0),
    (0.06, 0.94),
)  # fmt: skip
_COARSE_ENDS = (
    (0.0, 1.0), (-0.04, 1.04), (0.03, 0.97), (0.06, 0.94), (0.1, 0.9), (0.15, 0.85), (0.2, 0.8), (0.0, 0.94),
    (0.06, 1.0), (0.0, 0.88), (0.12, 1.0), (0.0, 0.8), (0.2, 1.0),
)  # fmt: skip
"""Where in the range of a group the first and the last code begin, of types of more and of at most 4 bits."""

Levels = tuple[Array, Array | None, Array | None, Array | None]
"""c (or d where there is one level) and k (or m) of each group, (..., blocks, groups); d and e, (..., blocks)."""


def search_levels(weight: Array, importance: Array | None, dtype: BlockType) -> Levels:
    """The scales of a weight.

    Args:
        weight: (rows, columns), rows of whole blocks; any float type.
        importance: Non-negative, broadcasts against the weight; None weighs all values the same.
        dtype: The type.

    Returns:
        c, k of shape (rows, columns / group) and d, e of shape (rows, columns / block), float32; with one level, d and
        m in place of c and k. What the type does not have is None.
    """
    xp = namespace(weight)
    rows, columns = weight.shape
    shape = (columns // dtype.block, dtype.groups, dtype.group)
    found: list[Levels] = []
    whole = importance is not None and importance.ndim == 2 and importance.shape[0] == rows
    for part in row_chunks(rows, 4 * columns, CHUNK):
        x = astype(weight[part], "float32").reshape(-1, *shape)
        h = None
        if importance is not None:
            h = astype(importance[part] if whole else importance, "float32").reshape(-1, *shape)
        found.append(_Search(x, h, dtype).solve())
    joined = [
        None if one[0] is None else xp.concatenate(list(one)).reshape(rows, -1) for one in zip(*found, strict=True)
    ]
    return joined[0], joined[1], joined[2], joined[3]


def _half(x: Array) -> Array:
    return round_to(x, DTYPES["float16"])


class _Search:
    """The search on one chunk: x of shape (rows, blocks, groups, values); sums go over the last axis."""

    def __init__(self, x: Array, importance: Array | None, dtype: BlockType) -> None:
        self.x, self.dtype, self.xp = x, dtype, namespace(x)
        self.h = importance
        self.hx = x if importance is None else x * importance
        self.signed = dtype.has_minimum and dtype.scales is None
        """True where a minimum may be negative."""

    def solve(self) -> Levels:
        s, m = self._free()
        if self.dtype.scales is None:
            return self._rounded(s, m)
        return self._two_levels(s, m)

    # One group --------------------------------------------------------------------------------------------------------

    def _free(self) -> tuple[Array, Array | None]:
        """The best unrounded s and m of each group."""
        xp, best = self.xp, None
        s = m = None
        for trial_s, trial_m in self._trials():
            for _ in range(2):
                q = self._codes(trial_s, trial_m)
                trial_s, trial_m = self._fit(q)
            error = self._error(trial_s, trial_m)
            if best is None:
                s, m, best = trial_s, trial_m, error
                continue
            better = error < best
            best = xp.where(better, error, best)
            s = xp.where(better, trial_s, s)
            m = None if m is None else xp.where(better, trial_m, m)
        assert s is not None
        return s, m

    def _trials(self) -> Iterator[tuple[Array, Array | None]]:
        xp, dtype = self.xp, self.dtype
        low, high = xp.amin(self.x, axis=-1), xp.amax(self.x, axis=-1)
        fine = dtype.bits > 4
        if dtype.has_minimum:
            if not self.signed:
                low = xp.clip(low, None, 0.0)
            for first, last in _FINE_ENDS if fine else _COARSE_ENDS:
                trial = (high - low) * (last - first)
                yield trial / dtype.max, -(low + (high - low) * first)
            return
        extreme = xp.where(-low > high, low, high)
        ends = (dtype.min, dtype.max)
        steps = [0.35 * i for i in range(-2, 5)] if fine else [0.0, 0.25, 0.5, 0.75, 1.0, 1.3, 1.7]
        for end in ends:
            for step in steps:
                # A larger end makes a smaller scale: what lies at the extreme is cut.
                by = step * (abs(end) / 8 if dtype.values else 1.0)
                yield extreme / (end + by if end > 0 else end - by), None

    def _fit(self, q: Array) -> tuple[Array, Array | None]:
        """S and m by least squares under codes."""
        xp = self.xp
        hq = q if self.h is None else q * self.h
        qq, qx = (hq * q).sum(-1), (hq * self.x).sum(-1)
        alone = _divide(qx, qq)
        if not self.dtype.has_minimum:
            return alone, None
        n = float(q.shape[-1])
        total = xp.full_like(qq, n) if self.h is None else (xp.zeros_like(q) + self.h).sum(-1)
        sum_q, sum_x = hq.sum(-1), self.hx.sum(-1)
        s = _divide(total * qx - sum_x * sum_q, total * qq - sum_q * sum_q)
        m = _divide(s * sum_q - sum_x, total)
        if self.signed:
            return s, m
        # Minimums are not negative, scales neither.
        wrong = (m < 0) | (s < 0)
        return xp.clip(xp.where(wrong, alone, s), 0.0, None), xp.where(wrong, 0.0, m)

    def _rounded(self, s: Array, m: Array | None) -> Levels:
        """One level: float16, and m fitted once more to the rounded s."""
        d = _half(s)
        if m is None:
            return d, None, None, None
        q = self._codes(d, m)
        total = None if self.h is None else (self.xp.zeros_like(q) + self.h).sum(-1)
        rest = q * d[..., None] - self.x
        again = rest.mean(-1) if self.h is None else _divide((rest * self.h).sum(-1), total)
        first, second = _half(m), _half(again)
        return d, self.xp.where(self._error(d, second) < self._error(d, first), second, first), None, None

    # A block of groups ------------------------------------------------------------------------------------------------

    def _two_levels(self, s: Array, m: Array | None) -> Levels:
        d, e = self._outer(s, m)
        assert self.dtype.scales is not None
        c, k = self.xp.clip(self.xp.round(_divide(s, d[..., None])), *self.dtype.scales), None
        if m is not None and e is not None:
            k = self.xp.clip(self.xp.round(_divide(m, e[..., None])), 0.0, self.dtype.minimums)
        error = self._error(*self._of_levels(c, k, d, e))
        for _ in range(PASSES):
            c, k, error = self._neighbours(c, k, d, e, error)
            new_d, new_e = self._fit_outer(c, k, d, e)
            for trial_d, trial_e in ((new_d, new_e), (new_d, e), (d, new_e)) if e is not None else ((new_d, None),):
                trial = self._error(*self._of_levels(c, k, trial_d, trial_e))
                better = trial.sum(-1) < error.sum(-1)
                error = self.xp.where(better[..., None], trial, error)
                d = self.xp.where(better, trial_d, d)
                e = None if e is None else self.xp.where(better, trial_e, e)
        c, k, error = self._neighbours(c, k, d, e, error)
        return c, k, d, e

    def _outer(self, s: Array, m: Array | None) -> tuple[Array, Array | None]:
        xp = self.xp
        assert self.dtype.scales is not None
        low, high = xp.amin(s, axis=-1), xp.amax(s, axis=-1)
        smallest, largest = self.dtype.scales
        extreme = xp.where(-low > high, low, high)
        d = _half(extreme / (smallest or largest))
        return d, None if m is None else _half(xp.amax(m, axis=-1) / self.dtype.minimums)

    def _of_levels(self, c: Array, k: Array | None, d: Array, e: Array | None) -> tuple[Array, Array | None]:
        return d[..., None] * c, None if k is None or e is None else e[..., None] * k

    def _neighbours(
        self, c: Array, k: Array | None, d: Array, e: Array | None, error: Array
    ) -> tuple[Array, Array | None, Array]:
        """Each group moves c and k by one where that loses less."""
        xp = self.xp
        assert self.dtype.scales is not None
        best_c, best_k = c, k
        for by_c in (-1, 0, 1):
            for by_k in (0,) if k is None else (-1, 0, 1):
                if by_c == by_k == 0:
                    continue
                near_c = xp.clip(c + by_c, *self.dtype.scales)
                near_k = None if k is None else xp.clip(k + by_k, 0.0, self.dtype.minimums)
                trial = self._error(*self._of_levels(near_c, near_k, d, e))
                better = trial < error
                error = xp.where(better, trial, error)
                best_c = xp.where(better, near_c, best_c)
                best_k = None if best_k is None else xp.where(better, near_k, best_k)
        return best_c, best_k, error

    def _fit_outer(self, c: Array, k: Array | None, d: Array, e: Array | None) -> tuple[Array, Array | None]:
        """D and e of each block by least squares under all its codes."""
        q = self._codes(*self._of_levels(c, k, d, e))
        a = q * c[..., None]
        ha = a if self.h is None else a * self.h
        aa, ax = (ha * a).sum((-1, -2)), (ha * self.x).sum((-1, -2))
        if k is None or e is None:
            return _half(_divide(ax, aa)), None
        hk = k[..., None] + self.xp.zeros_like(a) if self.h is None else k[..., None] * self.h
        kk, ak, kx = ((hk * k[..., None]).sum((-1, -2)), (a * hk).sum((-1, -2)), (hk * self.x).sum((-1, -2)))
        # The normal equations of x = d a - e k.
        determinant = aa * kk - ak * ak
        new_d = _divide(ax * kk - kx * ak, determinant)
        new_e = _divide(ak * ax - aa * kx, determinant)
        flat = determinant == 0
        return _half(self.xp.where(flat, d, new_d)), _half(self.xp.where(flat, e, new_e))

    # Both -------------------------------------------------------------------------------------------------------------

    def _codes(self, s: Array, m: Array | None) -> Array:
        return block_codes(self.x, s[..., None], None if m is None else m[..., None], self.dtype)

    def _error(self, s: Array, m: Array | None) -> Array:
        """The weighted square error of each group; infinite where the numbers are."""
        minimum = None if m is None else m[..., None]
        y = block_values(self._codes(s, m), s[..., None], minimum)
        y = (y - self.x) ** 2
        total = (y if self.h is None else y * self.h).sum(-1)
        return self.xp.where(self.xp.isfinite(total), total, like(float("inf"), total))


def _divide(x: Array, by: Array) -> Array:
    """X / by; 0 where that is no number."""
    xp = namespace(x)
    return xp.where(by == 0, 0.0, x / xp.where(by == 0, 1.0, by))
