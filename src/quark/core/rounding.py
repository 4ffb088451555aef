"""Rounding to the values of an element type.

A float type ExMy spaces its values by step(x) = 2^(max(floor(log2 |x|), emin) - mbits), so

    round_to(x) = step * round(x / step),   x first clipped to [min, max].

For half-even the division is not needed: with c = 1.5 * 2^(23 - mbits) * 2^floor(log2 |x|), the float32 sum
x + c has its last bit at step(x), the addition itself rounds half to even, and subtracting c is exact.
2^floor(log2 |x|) is the float32 bit pattern of x with all but the exponent cleared.
"""

from __future__ import annotations

from enum import Enum

from quark.core.array import Array, astype, dtype_name, is_torch, namespace, view
from quark.core.dtypes import Dtype


class RoundType(Enum):
    """Rounding of a real number to an integer."""

    half_up = 1
    """Nearest; ties toward plus infinity (what the DPU does)."""
    round = 2
    """Nearest; ties away from zero."""
    floor = 3
    """Toward minus infinity."""
    half_even = 8
    """Nearest; ties to the even integer (IEEE 754 default; what runtimes do)."""


def round_integer(x: Array, rounding: RoundType = RoundType.half_even) -> Array:
    """Round x (any float array) to integers, still as floats."""
    xp = namespace(x)
    if rounding is RoundType.half_even:
        return xp.round(x)
    if rounding is RoundType.floor:
        return xp.floor(x)
    if rounding is RoundType.half_up:
        return xp.floor((xp.floor(x * 2) + 1) * 0.5)  # not floor(x + 0.5), as below
    # Not trunc(x + 0.5): that sum rounds 0.49999997 up to 1.
    whole = xp.trunc(x)
    up = astype(abs(x - whole) >= 0.5, dtype_name(x))
    return whole + xp.copysign(up, x)


def _power_of_two_below(x: Array) -> Array:
    """2^floor(log2 |x|) of normal float32 numbers; 0 for zeros and subnormals."""
    return view(view(x, "int32") & 0x7F800000, "float32")


def round_to(x: Array, dtype: Dtype, rounding: RoundType = RoundType.half_even) -> Array:
    """Nearest value of `dtype` for each x, saturating at its range; float32 in and out. NaN stays NaN.

    Signed zeros keep their sign, as IEEE 754 conversion does; a type without a sign has 0.0 alone.
    """
    xp = namespace(x)
    if not dtype.is_float:
        return xp.clip(round_integer(x, rounding), dtype.min, dtype.max)
    clipped = xp.clip(x, dtype.min, dtype.max)
    if not dtype.signed:
        clipped = clipped + 0.0  # the larger one of -0.0 and 0.0 is either, and has no code with its sign here
    if rounding is RoundType.half_even:
        if is_torch(x) and dtype.name in ("bfloat16", "float16"):
            # torch's own conversions round half to even, in two steps where the bits take eight.
            return astype(astype(clipped, dtype.name), "float32")
        # bfloat16 has float32's own exponent range, where the sum of _round_exponent would overflow.
        if dtype.ebits != 8:
            return _round_exponent(clipped, dtype)
        bits, drop = view(clipped, "int32"), 23 - dtype.mbits
        rounded = (bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) & -(1 << drop)
        return xp.where(xp.isnan(clipped), clipped, view(rounded, "float32"))
    step = step_of(clipped, dtype)
    rounded = xp.copysign(round_integer(clipped / step, rounding), clipped)
    return xp.clip(rounded * step, dtype.min, dtype.max)


def step_of(x: Array, dtype: Dtype) -> Array:
    """step(x) of a float type at each x (float32), as in the formula above."""
    return namespace(x).clip(_power_of_two_below(x), 2.0**dtype.emin, None) * 2.0**-dtype.mbits


def _round_exponent(x: Array, dtype: Dtype) -> Array:
    xp = namespace(x)
    magic = xp.clip(_power_of_two_below(x), 2.0**dtype.emin, None)
    magic *= 1.5 * 2.0 ** (23 - dtype.mbits)
    rounded = x + magic
    rounded -= magic
    return xp.copysign(rounded, x)
