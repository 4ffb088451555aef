"""How far a quantized tensor is from the float one.

    SQNR = 10 log10(sum x^2 / sum (x - y)^2)      PSNR = 10 log10(max |x|^2 / mean (x - y)^2)
    cosine = <x, y> / (|x| |y|)                   L2 = |x - y|
    KL = sum p (log p - log q), p = softmax(x), q = softmax(y) along the last axis; mean over the rest

Sums are float64 on the host or on the device of x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quark.core.array import Array, astype, namespace


@dataclass
class Comparison:
    """The sums from which every metric follows: of many pairs of arrays as if they were one.

    Attributes:
        count: Values of x.
        signal: Sum of x^2.
        other: Sum of y^2.
        product: Sum of x y.
        noise: Sum of (x - y)^2.
        peak: Largest |x|.
    """

    count: int = 0
    signal: float = 0.0
    other: float = 0.0
    product: float = 0.0
    noise: float = 0.0
    peak: float = 0.0

    def update(self, x: Array, y: Array) -> Comparison:
        """Add one pair of arrays of one shape, of which nothing is kept."""
        x, y = astype(x, "float64"), astype(y, "float64")
        difference = x - y
        self.count += math.prod(x.shape)
        self.signal += float((x * x).sum())
        self.other += float((y * y).sum())
        self.product += float((x * y).sum())
        self.noise += float((difference * difference).sum())
        self.peak = max(self.peak, float(abs(x).max())) if math.prod(x.shape) else self.peak
        return self

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise ratio in dB; inf where x and y are equal."""
        return decibel(self.signal, self.noise)

    @property
    def psnr(self) -> float:
        """Peak signal to noise ratio in dB."""
        return decibel(self.peak**2, self.noise / max(1, self.count))

    @property
    def cosine(self) -> float:
        """Cosine of the angle between x and y; 1 for two zero tensors."""
        norms = math.sqrt(self.signal) * math.sqrt(self.other)
        return self.product / norms if norms else float(self.signal == self.other)

    @property
    def l2(self) -> float:
        """Euclidean distance."""
        return math.sqrt(self.noise)


def decibel(signal: float, noise: float) -> float:
    """10 log10(signal / noise): inf without noise, -inf without signal."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def sqnr(x: Array, y: Array) -> float:
    """Signal to quantization noise ratio in dB of y for the signal x; inf where they are equal."""
    return Comparison().update(x, y).sqnr


def psnr(x: Array, y: Array) -> float:
    """Peak signal to noise ratio in dB."""
    return Comparison().update(x, y).psnr


def cosine(x: Array, y: Array) -> float:
    """Cosine of the angle between x and y; 1 for two zero tensors."""
    return Comparison().update(x, y).cosine


def l2(x: Array, y: Array) -> float:
    """Euclidean distance of x and y."""
    return Comparison().update(x, y).l2


def kl(x: Array, y: Array) -> float:
    """Kullback-Leibler divergence, in nats, of softmax(y) from softmax(x) along the last axis; mean over the rest."""
    p, q = (_log_softmax(astype(part, "float64")) for part in (x, y))
    rows = math.prod(p.shape[:-1])
    return float((namespace(p).exp(p) * (p - q)).sum()) / max(1, rows)


def _log_softmax(x: Array) -> Array:
    xp = namespace(x)
    shifted = x - xp.amax(x, axis=-1, keepdims=True)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))
