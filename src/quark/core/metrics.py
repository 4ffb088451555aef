"""How far a quantized tensor is from the float one.

    SQNR = 10 log10(sum x^2 / sum (x - y)^2)      PSNR = 10 log10(max |x|^2 / mean (x - y)^2)
    cosine = <x, y> / (|x| |y|)                   L2 = |x - y|

Sums are float64 on the host or on the device of x.
"""

from __future__ import annotations

import math

from quark.core.array import Array, astype


def sqnr(x: Array, y: Array) -> float:
    """Signal to quantization noise ratio in dB of y for the signal x; inf where they are equal."""
    signal, noise = _sum_squares(x), _sum_squares(_difference(x, y))
    return decibel(signal, noise)


def decibel(signal: float, noise: float) -> float:
    """10 log10(signal / noise): inf without noise, -inf without signal."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def psnr(x: Array, y: Array) -> float:
    """Peak signal to noise ratio in dB."""
    noise = _sum_squares(_difference(x, y)) / max(1, math.prod(x.shape))
    return decibel(float(abs(x).max()) ** 2, noise)


def cosine(x: Array, y: Array) -> float:
    """Cosine of the angle between x and y; 1 for two zero tensors."""
    x, y = astype(x, "float64"), astype(y, "float64")
    norms = math.sqrt(_sum_squares(x) * _sum_squares(y))
    return float((x * y).sum()) / norms if norms else float(_sum_squares(x) == _sum_squares(y))


def l2(x: Array, y: Array) -> float:
    """Euclidean distance of x and y."""
    return math.sqrt(_sum_squares(_difference(x, y)))


def _difference(x: Array, y: Array) -> Array:
    return astype(x, "float64") - astype(y, "float64")


def _sum_squares(x: Array) -> float:
    x = astype(x, "float64")
    return float((x * x).sum())
