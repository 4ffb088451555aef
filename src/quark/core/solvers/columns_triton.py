"""A block of columns in one launch: the loops of columns.cpp as kernels for GPUs.

    solve     v_j = w_j + sum_{i < j} F_ij (t_i - q_i) + P_ij v_i,   t_j += sum_{i < j} P_ij v_i,   q_j = quantize(v_j)
    refine    q_j <- quantize(q_j + g_j / H_jj),   g_k += H_jk (change of q_j) for k > j

A program keeps the whole block of some rows in registers, (size, tile), and goes through the columns. Registers have
no index that is known at run time only: a column is taken out as the sum over all columns of the block with the others
at 0, which is exact, and a column is added to those after it as an outer product whose factors before are 0. No
program reads what it has written, and each one has rows of its own, so no order of memory matters.

Codes are those of `core/quantize.py` bit for bit: division is that of IEEE 754, no product is fused with a sum
(`EXACT`), and the sum that rounds holds numbers below 2^22 alone. Sums are taken in the order of columns.cpp.

This file imports triton, which PyTorch brings for GPUs: only `kernels.py` imports it, when a tensor is on one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import triton
import triton.language as tl

from quark.core.array import Array, namespace
from quark.core.solvers.columns import ColumnGrid, ColumnRule

ROWS = 32
"""Rows of a program: its block of 128 columns then takes 32 registers of each of its 128 threads."""
LEAST_COLUMNS = 16
"""Of a tile: no thread then holds an element that another one holds, too."""
EXACT = {"enable_fp_fusion": False, "num_warps": 4}
"""Options of a launch."""


@triton.jit
def quantized(
    v, s, z,
    low: tl.constexpr, high: tl.constexpr, divide: tl.constexpr, zero_before: tl.constexpr, zero_after: tl.constexpr,
    zero_decoded: tl.constexpr, float_bits: tl.constexpr, smallest_power: tl.constexpr,
):  # fmt: skip
    """The value of the code of v under a `ColumnRule`, with its scale and zero point, all (tile,)."""
    if float_bits >= 0:
        x = tl.div_rn(v, tl.where(s == 0.0, 1.0, s))
        x = tl.where(x < low, low, tl.where(x > high, high, x))
        bits = x.to(tl.int32, bitcast=True)
        magic = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        magic = tl.where(magic < smallest_power, smallest_power, magic) * (1.5 * 2.0 ** (23 - float_bits))
        rounded = (x + magic) - magic
        rounded_bits = rounded.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        sign = bits & -0x80000000
        return (rounded_bits | sign).to(tl.float32, bitcast=True) * s
    if divide:
        x = tl.div_rn(v, s)
    else:
        x = v * tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)
    if zero_before:
        x = x + z
    # Whatever is beyond these is beyond low and high, too, with any zero point of 16 bits.
    x = tl.where(x < -1048576.0, -1048576.0, tl.where(x > 1048576.0, 1048576.0, x))
    code = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: the last bit of the sum is 1, and ties go to even
    # The sum makes 0 of all that is rounded to 0, where rounding keeps a sign.
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    code = ((code.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | sign).to(tl.float32, bitcast=True)
    if zero_after:
        code = code + z
    code = tl.where(code < low, low, tl.where(code > high, high, code))
    if zero_decoded:
        code = code - z
    return code * s


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
        v = tl.sum(tl.where(here, now, 0.0), 0)
        t = tl.sum(tl.where(here, goal, 0.0), 0)
        j_long = tl.cast(j, tl.int64)
        scale_at = j_long * scale_stride + row + index * scale_problem
        s = tl.load(scale + scale_at, mask=within, other=1.0)
        z = s
        if zero_decoded:
            z = tl.load(zero + scale_at, mask=within, other=0.0)
        q = quantized(v, s, z, low, high, divide, zero_before, zero_after, zero_decoded, float_bits, smallest_power)
        lost = t - q
        at = j_long * stride + row + index * problem
        tl.store(work + at, v, mask=within)
        tl.store(result + at, q, mask=within)
        tl.store(missed + at, lost, mask=within)
        side = j_long * feedback_stride + column + index * feedback_problem
        later = (column > j) & (column < columns)
        now = now + tl.load(feedback + side, mask=later, other=0.0)[:, None] * lost[None, :]
        if pulled:
            tl.store(target + at, t, mask=within)
            drawn = tl.load(pull + side, mask=later, other=0.0)[:, None] * v[None, :]
            now = now + drawn
            goal = goal + drawn


@triton.jit
def refine_kernel(
    result, gradient, change, hessian, scale, zero,
    stride, scale_stride, hessian_stride, problem, scale_problem, hessian_problem, columns, rows,
    size: tl.constexpr, tile: tl.constexpr,
    low: tl.constexpr, high: tl.constexpr, divide: tl.constexpr, zero_before: tl.constexpr, zero_after: tl.constexpr,
    zero_decoded: tl.constexpr, float_bits: tl.constexpr, smallest_power: tl.constexpr,
):  # fmt: skip
    """The same visit of columns that have values; the gradient becomes that at which each column was visited."""
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
        before = tl.sum(tl.where(here, values, 0.0), 0)
        g = tl.sum(tl.where(here, slope, 0.0), 0)
        j_long = tl.cast(j, tl.int64)
        scale_at = j_long * scale_stride + row + index * scale_problem
        s = tl.load(scale + scale_at, mask=within, other=1.0)
        z = s
        if zero_decoded:
            z = tl.load(zero + scale_at, mask=within, other=0.0)
        sides = hessian + j_long * hessian_stride + index * hessian_problem
        own = tl.full([tile], 1.0, tl.float32) * tl.load(sides + j)
        v = before + tl.div_rn(g, own)
        q = quantized(v, s, z, low, high, divide, zero_before, zero_after, zero_decoded, float_bits, smallest_power)
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
    with _device(work):
        solve_kernel[_programs(work)](
            work, target, missed, result, feedback, feedback if pull is None else pull, grid.scale, _zero(grid),
            *_strides(work, grid, feedback), *work.shape[-2:], pulled=pull is not None, **_constants(work, grid),
            **EXACT,
        )  # fmt: skip


def refine_block(grid: ColumnGrid, result: Array, gradient: Array, change: Array, hessian: Array) -> None:
    """Visit the columns of one block again on a device; see `BlockSolver.refine`.

    Args:
        grid: Of these columns.
        result, gradient, change: (columns, rows), or (problems, columns, rows), views of contiguous tensors.
        hessian: (columns, columns), or (problems, columns, columns).
    """
    with _device(result):
        refine_kernel[_programs(result)](
            result, gradient, change, hessian, grid.scale, _zero(grid),
            *_strides(result, grid, hessian), *result.shape[-2:], **_constants(result, grid), **EXACT,
        )  # fmt: skip


def _device(x: Array) -> AbstractContextManager[Any]:
    """Within: kernels are launched on the device of x, whichever is the current one."""
    manager: AbstractContextManager[Any] = nullcontext()
    if x.device.type == "cuda":
        manager = namespace(x).cuda.device(x.device)
    return manager


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
    rule = ColumnRule.of(grid.spec)
    assert rule is not None
    columns = max(LEAST_COLUMNS, triton.next_power_of_2(block.shape[-2]))
    return {"size": columns, "tile": ROWS, **constants_of(rule)}


def constants_of(rule: ColumnRule) -> dict[str, Any]:
    """The arguments of the kernels that say how values become codes."""
    return {
        "low": float(rule.min), "high": float(rule.max), "divide": bool(rule.divide),
        "zero_before": bool(rule.zero_before), "zero_after": bool(rule.zero_after),
        "zero_decoded": bool(rule.zero_decoded), "float_bits": rule.float_bits,
        "smallest_power": float(rule.smallest_power),
    }  # fmt: skip
