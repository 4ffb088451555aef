"""Slow and independent implementations of the numerics, written from the formulas of the documented system.

Nothing here imports a function of quark.core: a type is described by its bits, values come from `ml_dtypes` or from
exact fractions, and blocks are walked one value at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np

Values = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

ML_DTYPES: dict[str, np.dtype] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "fp6_e3m2": np.dtype(ml_dtypes.float6_e3m2fn),
    "fp6_e2m3": np.dtype(ml_dtypes.float6_e2m3fn),
    "fp4_e2m1": np.dtype(ml_dtypes.float4_e2m1fn),
}
"""The float types that another library knows."""


@cache
def magnitudes(ebits: int, mbits: int, largest: float) -> Values:
    """All values >= 0 of ExMy up to `largest`, by code: exact fractions, held as float64 (which has room)."""
    values = []
    bias = 2 ** (ebits - 1) - 1
    for code in range(2 ** (ebits + mbits)):
        exponent, mantissa = divmod(code, 2**mbits)
        fraction = Fraction(mantissa, 2**mbits) + (1 if exponent else 0)
        value = fraction * Fraction(2) ** (max(exponent, 1) - bias)
        if value <= Fraction(largest):
            values.append(float(value))
    return np.array(values)


def nearest(x: Values, table: Values, ties: str = "even", signed: bool = True) -> Values:
    """The value of `table` (magnitudes by code) nearest to each x, by search; saturating.

    Args:
        x: Any numbers, exact in float64.
        table: Magnitudes in ascending order; the parity of an index is the parity of its code.
        ties: "even", "away", "up" (towards +infinity), or "floor" (no nearest: the largest value <= x).
        signed: Whether -table belongs to the type.
    """
    x = np.clip(np.asarray(x, np.float64), -table[-1] if signed else 0.0, table[-1])
    x = x if signed else np.abs(x)  # the larger one of -0.0 and 0.0 is either
    magnitude = np.abs(x)
    low = np.clip(np.searchsorted(table, magnitude, side="right") - 1, 0, len(table) - 1)
    high = np.minimum(low + 1, len(table) - 1)
    below, above = magnitude - table[low], table[high] - magnitude
    if ties == "floor":
        up = (np.signbit(x)) & (below > 0)
    elif ties == "away":
        up = below >= above
    elif ties == "up":
        up = np.where(np.signbit(x), below > above, below >= above)
    else:
        up = (below > above) | ((below == above) & (low % 2 == 1))
    index = np.where(up & (high != low), high, low)
    return np.copysign(table[index], x)


def probes(table: Values) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Every finite bfloat16, and every value and every tie of the type with its float32 neighbours, of both signs."""
    ties = (table[1:] + table[:-1]) / 2
    edges = [table[-1] + (table[-1] - table[-2]) / 2, table[-1] * 2, 3e38, float(np.finfo(np.float32).max)]
    special = np.concatenate([table, ties, edges])
    special = special[special <= float(np.finfo(np.float32).max)].astype(np.float32)
    with np.errstate(over="ignore"):
        above = np.nextafter(special, np.float32(np.inf))
    near = np.concatenate([special, above, np.nextafter(special, np.float32(0))])
    near = np.concatenate([near, -near])
    every = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    every = np.concatenate([near, every])
    return every[np.isfinite(every)]


def floor_log2(value: float) -> int:
    """floor(log2 value) of a positive float, exact."""
    return math.frexp(value)[1] - 1


def e8m0_exponent(amax: float, mbits: int, emax: int, rule: str) -> int:
    """Exponent of the OCP MX scale of a block whose largest magnitude is amax > 0 (reference, section 2.5)."""
    exponent = floor_log2(amax)
    fraction = Fraction(amax) / Fraction(2) ** exponent
    if rule == "ceil" and fraction > 1:
        exponent += 1
    if rule == "even" and math.floor(fraction * 2**mbits + Fraction(1, 2)) == 2 ** (mbits + 1):
        exponent += 1
    # Above 127 the largest code would overflow float32.
    return max(-127, min(127, min(exponent, 127) - emax))


def half_even(value: Fraction) -> int:
    """Nearest integer, ties to even (Python's own rule for fractions)."""
    return round(value)


def code_times_step(value: float, exponent: int, low: int, high: int) -> float:
    """value on the grid of step 2^exponent, its code clamped to [low, high]."""
    step = Fraction(2) ** exponent
    return float(max(low, min(high, half_even(Fraction(value) / step))) * step)


def micro_block(block: Sequence[float], bits: int) -> list[float]:
    """One block of MX4, MX6 or MX9 (reference, section 2.6): pairs whose own exponent is lower shift by one."""
    amax = max(map(abs, block))
    if amax == 0:
        return [0.0] * len(block)
    shared, limit = floor_log2(amax), 2 ** (bits - 1) - 1
    out: list[float] = []
    for i in range(0, len(block), 2):
        pair = block[i : i + 2]
        top = max(map(abs, pair))
        shift = 1 if top == 0 or floor_log2(top) < shared else 0
        out += [code_times_step(v, shared - shift - bits + 2, -limit, limit) for v in pair]
    return out


def bfp_block(block: Sequence[float]) -> list[float]:
    """One block of BFP16 (reference, section 2.6)."""
    amax = max(map(abs, block))
    if amax == 0:
        return [0.0] * len(block)
    exponent = floor_log2(amax) - 6
    codes = [half_even(Fraction(v) / Fraction(2) ** exponent) for v in block]
    if any(code >= 128 or code < -128 for code in codes):
        exponent += 1
    return [code_times_step(v, exponent, -128, 127) for v in block]


def mx_block(block: Sequence[float], table: Values, mbits: int, emax: int, rule: str) -> list[float]:
    """One block of an OCP MX float format."""
    amax = max(map(abs, block))
    if amax == 0:
        return [0.0] * len(block)
    scale = Fraction(2) ** e8m0_exponent(amax, mbits, emax, rule)
    scaled = np.array([float(Fraction(v) / scale) for v in block])
    return [float(Fraction(v) * scale) for v in nearest(scaled, table)]


def divergence(counts: Values, end: int, levels: int) -> float:
    """KL(P || Q) of the first `end` bins, tail added to the last, against `levels` levels spread back; loops only."""
    total = sum(counts)
    p = [float(c) for c in counts[:end]]
    p[-1] += float(sum(counts[end:]))
    members: dict[int, list[int]] = {}
    for i in range(end):
        members.setdefault(min(i * levels // end, levels - 1), []).append(i)
    q = [0.0] * end
    for group in members.values():
        used = [i for i in group if p[i] > 0]
        held = float(sum(counts[i] for i in group))
        for i in used:
            q[i] = held / len(used)
    mass = sum(q)
    if mass == 0:
        return math.inf
    return sum(p[i] / total * math.log((p[i] / total) / max(q[i] / mass, 1e-12)) for i in range(end) if p[i] > 0)
