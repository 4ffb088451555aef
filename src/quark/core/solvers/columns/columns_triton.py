"""A block of columns in one launch: the loops of columns.cpp as kernels for GPUs.

    solve     v_j = w_j + sum_{i < j} F_ij (t_i - q_i) + P_ij v_i,   q_j = quantize(v_j)
    refine    q_j <- quantize(q_j + g_j / H_jj),   g_k += H_jk (change of q_j) for k > j

A program keeps the whole block of some rows in registers, (size, tile), and goes through the columns. Registers have
no index that is known at run time only: a column is taken out as the sum over all columns of the block with the others
at 0, which is exact, and a column is added to those after it as an outer product whose factors before are 0. No
program reads what it has written, and each one has rows of its own, so no order of memory matters.

Sums are taken in the order of columns.cpp. Like elements_triton.py, which has the rounding, this file is imported
through `kernel_module` alone.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from quark.core.array import Array
from quark.core.kernels.element_rule import ElementRule
from quark.core.kernels.elements_triton import EXACT, constants_of, on_device_of, quantized
from quark.core.solvers.columns.columns import ColumnGrid

ROWS = 32
"""Rows of a program: its block of 128 columns then takes 32 registers of each of its 128 threads."""
_LEAST_COLUMNS = 16
"""Of a tile: no thread then holds an element that another one holds, too."""
OPTIONS = {**EXACT, "num_warps": 4}
"""Of a launch."""


@triton.jit
def taken(block, here):
    """The column of a block that `here` marks: a sum with zeros, which is exact."""
    return tl.sum(tl.where(here, block, 0.0), 0)


@triton.jit
def rounded(
    v, scale, zero, at, within,
    low: tl.constexpr, high: tl.constexpr, divide: tl.constexpr, zero_before: tl.constexpr, zero_after: tl.constexpr,
    zero_decoded: tl.constexpr, float_bits: tl.constexpr, smallest_power: tl.constexpr,
):  # fmt: skip
    """The values of the codes of a column, whose scales and zero points lie at `at`."""
    s = tl.load(scale + at, mask=within, other=1.0)
    z = s
    if zero_decoded:
        z = tl.load(zero + at, mask=within, other=0.0)
    return quantized(v, s, z, low, high, divide, zero_before, zero_after, zero_decoded, float_bits, smallest_power)


@triton.jit
def solve_kernel(
    work, target, missed, result, feedback, pull, scale, zero,
    stride, scale_stride, feedback_stride, problem, scale_problem, feedback_problem, columns, rows,
    pulled: tl.constexpr, size: tl.constexpr, tile: tl.constexpr,
    low: tl.constexpr, high: tl.constexpr, divide: tl.constexpr, zero_before: tl.constexpr, zero_after: tl.constexpr,
    zero_decoded: tl.constexpr, float_bits: tl.constexpr, smallest_power: tl.constexpr,
):  # fmt: skip
    """Columns [0, columns) of rows [tile * program 0, ...) of problem (program 1); strides and problems in elements."""
    index = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.arange(0, size)
    within = row < rows
    place = column.to(tl.int64)[:, None] * stride + row[None, :] + index * problem
    inside = (column < columns)[:, None] & within[None, :]
    now = tl.load(work + place, mask=inside, other=0.0)
    goal = tl.load(target + place, mask=inside, other=0.0)
    for j in range(columns):
        here = (column == j)[:, None]
        v = taken(now, here)
        t = taken(goal, here)
        j_long = tl.cast(j, tl.int64)
        scale_at = j_long * scale_stride + row + index * scale_problem
        q = rounded(
            v, scale, zero, scale_at, within,
            low, high, divide, zero_before, zero_after, zero_decoded, float_bits, smallest_power,
        )  # fmt: skip
        lost = t - q
        at = j_long * stride + row + index * problem
        tl.store(work + at, v, mask=within)
        tl.store(result + at, q, mask=within)
        tl.store(missed + at, lost, mask=within)
        side = j_long * feedback_stride + column + index * feedback_problem
        later = (column > j) & (column < columns)
        now = now + tl.load(feedback + side, mask=later, other=0.0)[:, None] * lost[None, :]
        if pulled:
            now = now + tl.load(pull + side, mask=later, other=0.0)[:, None] * v[None, :]


@triton.jit
def refine_kernel(
    result, gradient, change, hessian, scale, zero,
    stride, scale_stride, hessian_stride, problem, scale_problem, hessian_problem, columns, rows,
    size: tl.constexpr, tile: tl.constexpr,
    low: tl.constexpr, high: tl.constexpr, divide: tl.constexpr, zero_before: tl.constexpr, zero_after: tl.constexpr,
    zero_decoded: tl.constexpr, float_bits: tl.constexpr, smallest_power: tl.constexpr,
):  # fmt: skip
    """Visit columns [0, columns) that have values, of rows [tile * program 0, ...) of problem (program 1); the gradient
    becomes that at which each column was visited.
    """
    index = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.arange(0, size)
    within = row < rows
    place = column.to(tl.int64)[:, None] * stride + row[None, :] + index * problem
    inside = (column < columns)[:, None] & within[None, :]
    values = tl.load(result + place, mask=inside, other=0.0)
    slope = tl.load(gradient + place, mask=inside, other=0.0)
    for j in range(columns):
        here = (column == j)[:, None]
        before = taken(values, here)
        g = taken(slope, here)
        j_long = tl.cast(j, tl.int64)
        scale_at = j_long * scale_stride + row + index * scale_problem
        sides = hessian + j_long * hessian_stride + index * hessian_problem
        own = tl.full([tile], 1.0, tl.float32) * tl.load(sides + j)
        v = before + tl.div_rn(g, own)
        q = rounded(
            v, scale, zero, scale_at, within,
            low, high, divide, zero_before, zero_after, zero_decoded, float_bits, smallest_power,
        )  # fmt: skip
        moved = before - q
        at = j_long * stride + row + index * problem
        tl.store(result + at, q, mask=within)
        tl.store(gradient + at, g, mask=within)
        tl.store(change + at, moved, mask=within)
        later = (column > j) & (column < columns)
        slope = slope + tl.load(sides + column, mask=later, other=0.0)[:, None] * moved[None, :]


def solve_block(
    grid: ColumnGrid, work: Array, target: Array, missed: Array, result: Array, feedback: Array, pull: Array | None
) -> None:
    """Solve the columns of one block on a device; see `BlockSolver.solve`.

    Args:
        grid: Of these columns.
        work, target, missed, result: (columns, rows), or (problems, columns, rows), views of contiguous tensors.
        feedback, pull: (columns, columns), or (problems, columns, columns).
    """
    with on_device_of(work):
        solve_kernel[_programs(work)](
            work, target, missed, result, feedback, feedback if pull is None else pull, grid.scale, _zero(grid),
            *_strides(work, grid, feedback), *work.shape[-2:], pulled=pull is not None, **_constants(work, grid),
            **OPTIONS,
        )  # fmt: skip


def refine_block(grid: ColumnGrid, result: Array, gradient: Array, change: Array, hessian: Array) -> None:
    """Visit the columns of one block again on a device; see `BlockSolver.refine`.

    Args:
        grid: Of these columns.
        result, gradient, change: (columns, rows), or (problems, columns, rows), views of contiguous tensors.
        hessian: (columns, columns), or (problems, columns, columns).
    """
    with on_device_of(result):
        refine_kernel[_programs(result)](
            result, gradient, change, hessian, grid.scale, _zero(grid),
            *_strides(result, grid, hessian), *result.shape[-2:], **_constants(result, grid), **OPTIONS,
        )  # fmt: skip


def _zero(grid: ColumnGrid) -> Array:
    """The zero points; anything where there are none, as nothing reads it."""
    return grid.scale if grid.zero is None else grid.zero


def _programs(block: Array) -> tuple[int, int]:
    return triton.cdiv(block.shape[-1], ROWS), block.shape[0] if block.ndim == 3 else 1


def _strides(block: Array, grid: ColumnGrid, square: Array) -> tuple[int, ...]:
    """Elements from one column to the next, and from one problem to the next, of each kind of array."""
    arrays = (block, grid.scale, square)
    return (*(x.stride(-2) for x in arrays), *(x.stride(0) if x.ndim == 3 else 0 for x in arrays))


def _constants(block: Array, grid: ColumnGrid) -> dict[str, Any]:
    rule = ElementRule.of(grid.spec)
    assert rule is not None
    columns = max(_LEAST_COLUMNS, triton.next_power_of_2(block.shape[-2]))
    return {"size": columns, "tile": ROWS, **constants_of(rule)}
