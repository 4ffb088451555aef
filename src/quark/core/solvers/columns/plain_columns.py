"""Blocks of columns in numpy and torch: what a device without a kernel runs, where each operation is a launch.

    solve     v_j = w_j + sum_{i < j} F_ij t_i - sum_{i < j} F_ij q_i,   q_j = quantize(v_j)
    refine    v_j = q_j + g_j / H_jj + sum_{i < j} S_ji q_i - sum_{i < j} S_ji q'_i,   S = H / diag(H),   q'_j likewise

All but the last sum is known before the first column is rounded, so a block begins with one matrix product, and a
column costs one product with a vector and the steps of `core/quantize.py`:

    integers    round, clip                  in units of the scale: v / s is rounded, and v / s holds the sums
    floats      search, take                 the value of a table whose cell v / s lies in

Where columns have scales of their own, v is multiplied by 1 / s, and the code by s: two steps more.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cache
from typing import Any

import numpy as np

from quark.core.array import Array, NumpyArray, copied_once, is_torch, namespace
from quark.core.dtypes import Dtype
from quark.core.solvers.columns.columns import ColumnGrid, has_rule
from quark.core.solvers.columns.halves import add_product, add_row_product

WORTH_SHARING = 8
"""Columns with one scale for each row from which on a block of them costs less than its columns one by one."""


class PlainBlocks:
    """Blocks of columns whose element type has a rule that can be written as steps in place."""

    most, shares = 128, True

    def takes(self, rounder: Any, work: Array) -> bool:
        return hasattr(rounder, "block") and has_rule(rounder.spec)

    def solve(
        self,
        grid: ColumnGrid,
        work: Array,
        target: Array,
        missed: Array,
        result: Array,
        feedback: Array,
        pull: Array | None,
    ) -> None:
        xp = namespace(work)
        if pull is None:
            steps = _Steps(grid)
            add_product(work, xp.swapaxes(xp.triu(feedback, 1), -1, -2), target)
            steps.enter(work)
            for j in range(work.shape[-2]):
                column = work[..., j, :]
                if j:
                    add_row_product(column, feedback[..., :j, j], result[..., :j, :], -1)
                steps.quantize(j, column, result[..., j, :])
            steps.leave(work)
            steps.finish(result)
        else:
            self._solve_pulled(grid, work, target, result, feedback, pull)
        xp.subtract(target, result, out=missed)

    def _solve_pulled(
        self, grid: ColumnGrid, work: Array, target: Array, result: Array, feedback: Array, pull: Array
    ) -> None:
        """Rows v_i and q_i of a column lie side by side, so that one product serves both.

        v_j += P_ij v_i - F_ij q_i
        """
        # P counts from v itself, without the zero point that is added for rounding.
        xp, steps, columns = namespace(work), _Steps(grid, not grid.spec.float_zero_point), work.shape[-2]
        add_product(work, xp.swapaxes(xp.triu(feedback, 1), -1, -2), target)
        steps.enter(work)
        beside = xp.stack([work, result], -2)
        flat = beside.reshape(*beside.shape[:-3], 2 * columns, beside.shape[-1])
        sides = xp.stack([xp.swapaxes(pull, -1, -2), -xp.swapaxes(feedback, -1, -2)], -1)
        sides = sides.reshape(*sides.shape[:-2], 2 * columns)
        for j in range(columns):
            if j:
                add_row_product(beside[..., j, 0, :], sides[..., j, : 2 * j], flat[..., : 2 * j, :])
            steps.quantize(j, beside[..., j, 0, :], beside[..., j, 1, :])
        for index, part in enumerate((work, result)):
            part[...] = beside[..., index, :]
        steps.leave(work)
        steps.finish(result)

    def refine(self, grid: ColumnGrid, result: Array, gradient: Array, change: Array, hessian: Array) -> None:
        xp, steps = namespace(result), _Steps(grid)
        own = xp.diagonal(hessian, 0, -2, -1)[..., None]
        sides = xp.tril(hessian, -1) / own
        wanted = gradient
        wanted /= own
        wanted += result
        add_product(wanted, sides, result)
        change[...] = result
        columns = result.shape[-2]
        run = columns if steps.shared or grid.shared == 1 else grid.shared
        for start in range(0, columns, run):
            here = slice(start, min(start + run, columns))
            part, solved = wanted[..., here, :], result[..., here, :]
            if start:
                add_product(part, sides[..., here, :start], result[..., :start, :], -1)
            _refine_run(steps.of_run(start) if run < columns else steps, part, solved, sides[..., here, here])
        change -= result


def _refine_run(steps: _Steps, wanted: Array, result: Array, sides: Array) -> None:
    """Visit columns again, before which nothing has changed that `wanted` does not know of."""
    steps.enter(wanted)
    for j in range(result.shape[-2]):
        if j:
            add_row_product(wanted[..., j, :], sides[..., j, :j], result[..., :j, :], -1)
        steps.quantize(j, wanted[..., j, :], result[..., j, :])
    steps.finish(result)


class OneByOne:
    """Blocks of columns under any rounder, which is called for each of them."""

    most, shares = 128, False

    def takes(self, rounder: Any, work: Array) -> bool:
        return True

    def solve(
        self,
        grid: Callable[[int, Array], Array],
        work: Array,
        target: Array,
        missed: Array,
        result: Array,
        feedback: Array,
        pull: Array | None,
    ) -> None:
        xp = namespace(work)
        for j in range(work.shape[-2]):
            column, before = work[..., j, :], slice(j)
            if j:
                add_row_product(column, feedback[..., before, j], missed[..., before, :])
            if j and pull is not None:
                add_row_product(column, pull[..., before, j], work[..., before, :])
            result[..., j, :] = grid(j, work)
            xp.subtract(target[..., j, :], result[..., j, :], out=missed[..., j, :])

    def refine(
        self, grid: Callable[[int, Array], Array], result: Array, gradient: Array, change: Array, hessian: Array
    ) -> None:
        for j in range(result.shape[-2]):
            slope, column = gradient[..., j, :], result[..., j, :]
            if j:
                add_row_product(slope, hessian[..., j, :j], change[..., :j, :])
            before = column * 1.0
            column += slope / hessian[..., j, j, None]
            column[...] = grid(j, result)
            namespace(result).subtract(before, column, out=change[..., j, :])


class _Steps:
    """`quantize_elements` in steps that write in place; what follows from the scales alone is computed once.

    Columns that share their scales are in units of them: `enter` and `leave` divide and multiply a whole block,
    `quantize` gives codes less the zero point, and `finish` makes values of them. Else `quantize` gives values.
    """

    def __init__(self, grid: ColumnGrid, shares: bool = True) -> None:
        spec, xp = grid.spec, namespace(grid.scale)
        self.dtype: Dtype = spec.dtype
        self.shared = shares and grid.shared >= max(grid.scale.shape[-2], WORTH_SHARING)
        here = slice(0, 1) if self.shared else slice(None)
        self.scale = grid.scale[..., here, :]
        decoded = grid.zero is not None and not (spec.symmetric and spec.dtype.signed)
        self.zero = grid.zero[..., here, :] if grid.zero is not None and decoded else None
        self.before = spec.float_zero_point
        self.divides = spec.dtype.is_block or spec.dtype.is_float
        if spec.dtype.is_float:  # a group of zeros may have scale 0 (E5M3)
            self.factor = xp.where(self.scale == 0, 1.0, self.scale)
            self.table, self.bounds = (
                copied_once((spec.dtype.name, part), lambda part=part: float_table(spec.dtype)[part], grid.scale)  # type: ignore[misc]
                for part in range(2)
            )
        else:
            self.factor = self.scale if self.divides else 1.0 / self.scale
        # round(x) + zero in [min, max] as round(x) in [min - zero, max - zero]: whole numbers, so the same code.
        self.low, self.high = spec.dtype.min, spec.dtype.max
        if self.zero is not None and not self.before:
            self.low, self.high = spec.dtype.min - self.zero, spec.dtype.max - self.zero

    def of_run(self, start: int) -> _Steps:
        """Those of columns from `start` on that share their scales."""
        own, here = copy(self), slice(start, start + 1)
        own.shared, own.scale, own.factor = True, self.scale[..., here, :], self.factor[..., here, :]
        own.zero = None if self.zero is None else self.zero[..., here, :]
        own.low, own.high = (x if isinstance(x, (int, float)) else x[..., here, :] for x in (self.low, self.high))
        return own

    def enter(self, block: Array) -> None:
        """Into units of the scales, where columns share them; with what is added before rounding."""
        if self.shared:
            self._into_units(block, self.factor, self.zero, block)

    def leave(self, block: Array) -> None:
        """Back."""
        if self.shared:
            if self.before and self.zero is not None:
                block -= self.zero
            block *= self.scale

    def quantize(self, index: int, values: Array, out: Array) -> None:
        """One column, shape (..., rows)."""
        xp = namespace(values)
        row = 0 if self.shared else index
        zero = None if self.zero is None else self.zero[..., row, :]
        if not self.shared:
            self._into_units(values, self.factor[..., row, :], zero, out)
            values = out
        if self.dtype.is_float:
            values = values.contiguous() if is_torch(values) else values
            xp.take(self.table, xp.searchsorted(self.bounds, values), out=out)
        else:
            low, high = (x if isinstance(x, (int, float)) else x[..., row, :] for x in (self.low, self.high))
            xp.round(values, out=out)
            xp.clip(out, low, high, out=out)
            if self.before and zero is not None:
                out -= zero
        if not self.shared:
            out *= self.scale[..., row, :]

    def finish(self, block: Array) -> None:
        """The values of a block that was quantized."""
        if self.shared:
            block *= self.scale
        if self.zero is not None:
            block += 0.0  # a code less its zero point is never -0

    def _into_units(self, values: Array, factor: Array, zero: Array | None, out: Array) -> None:
        xp = namespace(values)
        (xp.divide if self.divides else xp.multiply)(values, factor, out=out)
        if self.before and zero is not None:
            out += zero


@cache
def float_table(dtype: Dtype) -> tuple[NumpyArray, NumpyArray]:
    """The values of a float type, and the largest float32 that is rounded to each of them but the last, which is NaN.

        value of x = values[searchsorted(bounds, x)]         bounds[i - 1] < x <= bounds[i]

    Ties go to the even code. A negative x is rounded to -0 at most, as `round_to` does; -0 itself becomes 0.
    """
    steps = 1 << dtype.mbits
    largest = 2.0**dtype.emin / steps
    codes = [code * largest for code in range(steps)]  # subnormal
    exponent = dtype.emin
    while 2.0**exponent <= dtype.max:
        codes += [2.0**exponent * (1 + code / steps) for code in range(steps)]
        exponent += 1
    half = np.array([code for code in codes if code <= dtype.max], np.float32)
    ties = (half[1:] + half[:-1]) / 2
    below = np.nextafter(ties, np.float32(-np.inf))
    even = np.arange(len(ties)) % 2 == 0  # the lower code of the two
    positive = np.where(even, ties, below)
    if not dtype.signed:
        return np.append(half, np.float32(np.nan)), np.append(positive, np.float32(np.inf))
    negative = np.where(even, np.nextafter(-ties, np.float32(-np.inf)), -ties)[::-1]
    smallest = -np.nextafter(np.float32(0), np.float32(1))
    bounds = np.concatenate([negative, [smallest], positive, [np.inf]])
    return np.concatenate([-half[::-1], half, [np.nan]]).astype(np.float32), bounds.astype(np.float32)
