"""Fake quantization of groups in one launch, as kernels for GPUs.

    stored   y = (code of x under a scale that is given) * scale
    live     the same under the scale that the magnitudes of a group ask for, which the program finds first

A program takes a tile of `tall` rows, or groups, of `wide` values. Scales follow from magnitudes as `core/scales.py`
says, in integers: the patterns of float32 magnitudes are ordered as they are, and NaN is above them all.

This file imports triton, which PyTorch brings for GPUs: only `kernel_module` imports it, when a tensor is on one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quark.core.array import Array, dtype_name
from quark.core.kernels.elements_triton import (
    EXACT,
    constants_of,
    float_rounded,
    integer_rounded,
    on_device_of,
    quantized,
)
from quark.core.kernels.group_rules import LiveRule, StoredRule

MANTISSA = {"float32": 23, "bfloat16": 7, "float16": 10}
"""Bits that a type of tensors keeps."""
TILE = 1024
"""Values of a program, where a group has no more."""


@triton.jit
def narrowed(y, bits: tl.constexpr):
    """The nearest float32 that a type of tensors with so many mantissa bits holds: 7 of bfloat16, 10 of float16.

    As rounding goes by type and device, bfloat16 is rounded here, half to even in the last bit that is kept.
    """
    if bits == 7:
        pattern = y.to(tl.int32, bitcast=True)
        kept = (pattern + 0x7FFF + ((pattern >> 16) & 1)) & -0x10000
        return tl.where(y != y, y, kept.to(tl.float32, bitcast=True))
    if bits == 10:
        y = tl.where(y < -65504.0, -65504.0, tl.where(y > 65504.0, 65504.0, y))
        return y.to(tl.float16).to(tl.float32)
    return y


@triton.jit
def stored_kernel(
    x, out, scale, zero, second,
    rows, length, pieces, run, period, groups,
    size: tl.constexpr, one_group: tl.constexpr, two_levels: tl.constexpr, bits: tl.constexpr,
    tall: tl.constexpr, wide: tl.constexpr,
    low: tl.constexpr, high: tl.constexpr, divide: tl.constexpr, zero_before: tl.constexpr, zero_after: tl.constexpr,
    zero_decoded: tl.constexpr, float_bits: tl.constexpr, smallest_power: tl.constexpr,
):  # fmt: skip
    """Pieces of rows, `wide` columns each, under the scales of `Runs`."""
    piece = tl.program_id(0).to(tl.int64) * tall + tl.arange(0, tall)
    row = piece // pieces
    column = (piece % pieces).to(tl.int32)[:, None] * wide + tl.arange(0, wide)[None, :]
    inside = (row < rows)[:, None] & (column < length)
    place = row[:, None] * length + column
    first = (((row // run) % period) * groups)[:, None]
    at = first + (column * 0 if one_group else column // size)
    v = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(scale + at, mask=inside, other=1.0)
    if two_levels:
        s = s * tl.load(second)
    z = s
    if zero_decoded:
        z = tl.load(zero + at, mask=inside, other=0.0)
    y = quantized(v, s, z, low, high, divide, zero_before, zero_after, zero_decoded, float_bits, smallest_power)
    tl.store(out + place, narrowed(y, bits).to(out.dtype.element_ty), mask=inside)


@triton.jit
def exponent(bits):
    """floor(log2) of the magnitude with that pattern; -127 for zeros and subnormals."""
    return ((bits >> 23) & 0xFF) - 127


@triton.jit
def power(e):
    """2^e for e in [-149, 127]."""
    normal = (tl.where(e < -126, -126, e) + 127) << 23
    shift = e + 149
    subnormal = tl.full(e.shape, 1, tl.int32) << tl.where(shift < 0, 0, tl.where(shift > 22, 22, shift))
    return tl.where(e < -126, subnormal, normal).to(tl.float32, bitcast=True)


@triton.jit
def shared_scale(
    largest, added: tl.constexpr, up: tl.constexpr, emax: tl.constexpr, steps: tl.constexpr, at_zero: tl.constexpr
):  # fmt: skip
    """The E8M0 scale of a block."""
    bits = largest + added
    e = exponent(bits)
    if up:
        e = e + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    e = tl.where(e > 127, 127, e) - emax
    e = tl.where(e < -127, -127, tl.where(e > 127, 127, e))
    s = power(e - steps)
    if at_zero:
        s = tl.where(largest == 0, 1.1920928955078125e-07, s)
    return s


@triton.jit
def range_scale(
    largest, reach: tl.constexpr, integer: tl.constexpr, narrow: tl.constexpr,
    narrow_low: tl.constexpr, narrow_high: tl.constexpr, narrow_bits: tl.constexpr, narrow_power: tl.constexpr,
):  # fmt: skip
    """The scale under which the largest magnitude is the largest code, rounded to the type of scales."""
    largest = largest.to(tl.float32, bitcast=True)
    s = tl.div_rn(largest, tl.full(largest.shape, reach, tl.float32))
    if narrow_bits >= 0:
        return float_rounded(s, narrow_low, narrow_high, narrow_bits, narrow_power)
    if integer:
        s = tl.where(s < 1.1920928955078125e-07, 1.1920928955078125e-07, s)
    else:
        s = tl.where(s == 0.0, 1.1920928955078125e-07, s)
    if narrow == 7:
        s = tl.where(s > 3.3895313892515355e38, 3.3895313892515355e38, s)
    s = narrowed(s, narrow)
    if integer:
        return s
    return tl.where(s == 0.0, 1.1920928955078125e-07, s)


@triton.jit
def pair_step(largest, pair, steps: tl.constexpr):
    """The step of each value of a block whose pairs may lie one binade below it."""
    block = exponent(largest)[:, None]
    below = (exponent(pair) < block).to(tl.int32)
    return power(block - below - steps)


@triton.jit
def wide_step(v, largest):
    """The step of BFP16, doubled where a code would leave [-128, 127]."""
    s = power(exponent(largest) - 6)[:, None]
    code = integer_rounded(tl.div_rn(v, tl.broadcast_to(s, v.shape)))
    over = tl.max(((code > 127.0) | (code < -128.0)).to(tl.int32), 1)[:, None]
    return tl.where(over > 0, s * 2.0, s)


@triton.jit
def live_kernel(
    x, out,
    rows, length, groups,
    kind: tl.constexpr, added: tl.constexpr, up: tl.constexpr, emax: tl.constexpr, steps: tl.constexpr,
    at_zero: tl.constexpr, reach: tl.constexpr, narrow: tl.constexpr, narrow_low: tl.constexpr,
    narrow_high: tl.constexpr, narrow_bits: tl.constexpr, narrow_power: tl.constexpr,
    size: tl.constexpr, bits: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
    low: tl.constexpr, high: tl.constexpr, divide: tl.constexpr, zero_before: tl.constexpr, zero_after: tl.constexpr,
    zero_decoded: tl.constexpr, float_bits: tl.constexpr, smallest_power: tl.constexpr,
):  # fmt: skip
    """Groups of `size` neighbours in a row, `tall` of them; the last of a row may be short."""
    group = tl.program_id(0).to(tl.int64) * tall + tl.arange(0, tall)
    row = group // groups
    lane = tl.arange(0, wide)[None, :]
    start = (group % groups).to(tl.int32)[:, None] * size
    inside = (row < rows)[:, None] & (lane < size) & (start + lane < length)
    place = row[:, None] * length + start + lane
    v = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    pattern = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(pattern, 1)
    if kind == 0:
        s = range_scale(
            largest, reach, float_bits < 0, narrow, narrow_low, narrow_high, narrow_bits, narrow_power
        )[:, None]  # fmt: skip
    elif kind == 1:
        s = shared_scale(largest, added, up, emax, steps, at_zero)[:, None]
    elif kind == 2:
        beside = start + (lane ^ 1)
        there = (row < rows)[:, None] & (lane < size) & (beside < length)
        other = tl.load(x + row[:, None] * length + beside, mask=there, other=0.0).to(tl.float32)
        other_pattern = other.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        s = pair_step(largest, tl.where(pattern > other_pattern, pattern, other_pattern), steps)
    else:
        s = wide_step(v, largest)
    # What holds a NaN has a scale that is one.
    s = tl.where((largest > 0x7F800000)[:, None], largest.to(tl.float32, bitcast=True)[:, None], s)
    s = tl.broadcast_to(s, v.shape)
    y = quantized(v, s, s, low, high, divide, zero_before, zero_after, zero_decoded, float_bits, smallest_power)
    tl.store(out + place, narrowed(y, bits).to(out.dtype.element_ty), mask=inside)


def stored(x: Array, out: Array, scale: Array, zero: Array | None, second: Array | None, rule: StoredRule) -> None:
    """Write what x becomes under given scales to `out`.

    Args:
        x, out: Contiguous, of one shape and dtype; they may be one tensor.
        scale, zero: Float32, contiguous, as they are stored.
        second: The scale of the scales, one float32, or None.
        rule: What follows from spec and shape.
    """
    runs = rule.runs
    wide = min(TILE, triton.next_power_of_2(runs.length))
    tall, pieces = TILE // wide, triton.cdiv(runs.length, wide)
    with on_device_of(x):
        stored_kernel[(triton.cdiv(runs.rows * pieces, tall),)](
            x, out, scale, scale if zero is None else zero, scale if second is None else second,
            runs.rows, runs.length, pieces, runs.run, runs.period, runs.groups,
            size=runs.size if runs.groups > 1 else 1, one_group=runs.groups == 1, two_levels=second is not None,
            bits=MANTISSA[dtype_name(x)], tall=tall, wide=wide, **constants_of(rule.element), **EXACT,
        )  # fmt: skip


def live(x: Array, out: Array, rule: LiveRule) -> None:
    """Write what x becomes under scales of its own to `out`; as `stored`."""
    runs = rule.runs
    wide = triton.next_power_of_2(runs.size)
    tall = max(1, TILE // wide)
    with on_device_of(x):
        live_kernel[(triton.cdiv(runs.rows * runs.groups, tall),)](
            x, out, runs.rows, runs.length, runs.groups, **rule.scale, size=runs.size, bits=MANTISSA[dtype_name(x)],
            tall=tall, wide=wide, **constants_of(rule.element), num_warps=warps_for(wide), **EXACT,
        )  # fmt: skip


def warps_for(wide: int) -> int:
    """Warps of a program for which a thread holds 32 values of a group at most."""
    return max(4, min(16, wide // 1024))
