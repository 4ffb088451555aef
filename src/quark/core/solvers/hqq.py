"""HQQ, half-quadratic quantization (Badri and Shaji, 2023): zero points under which a weight loses least, without data.

    argmin over z of  sum |W - s (Q - z)|^p,    Q = clip(round(W / s + z)),    p = 0.7

The errors of outliers should not weigh as squares do. A variable E of their own takes them, under a penalty beta that
grows by kappa each round; both steps have a closed form:

    E = shrink(W - s (Q - z)),    shrink(r) = sign(r) max(|r| - |r|^(p - 1) / beta, 0)
    z = mean of Q - (W - E) / s over the values that share z

The scales stay those of the range. The zero points of the round with the least error are the result.
"""

from __future__ import annotations

import numpy as np

from quark.core.array import NumpyArray
from quark.core.dtypes import DTYPES
from quark.core.quantize import dequantize, quantize
from quark.core.rounding import round_to
from quark.core.scales import QParams
from quark.core.spec import ScaleType, TensorSpec

NORM, BETA, KAPPA, ROUNDS = 0.7, 10.0, 1.01, 20


def solve(weight: NumpyArray, params: QParams, spec: TensorSpec) -> QParams:
    """Better zero points for a weight.

    Args:
        weight: float32.
        params: Scales and zero points of the range.
        spec: With float zero points.
    """
    split, shape = spec.split, weight.shape
    scale = split.to_elements(np.asarray(params.scale, np.float32), shape)
    count = split.sums(np.ones_like(weight))
    best, least = params, split.sums(_error(weight, params, spec))
    beta = BETA
    for _ in range(ROUNDS):
        codes = np.asarray(quantize(weight, params, spec))
        rest = weight - np.asarray(dequantize(codes, params, spec))
        size = np.abs(rest)
        # |r|^(p - 1) of 0 is infinite, and 0 shrinks to 0.
        outlier = np.sign(rest) * np.maximum(size - np.maximum(size, 1e-12) ** (NORM - 1) / beta, 0)
        zero = split.sums(codes - (weight - outlier) / scale) / count
        zero = np.asarray(zero, np.float32)  # in the type of the scale, which zero points are stored in
        zero = np.asarray(round_to(zero, DTYPES["float16"])) if spec.scale_type is ScaleType.float16 else zero
        params = QParams(params.scale, zero)
        error = split.sums(_error(weight, params, spec))
        better = error < least
        least = np.where(better, error, least)
        best = QParams(best.scale, np.where(better, np.asarray(params.zero_point), np.asarray(best.zero_point)))
        beta *= KAPPA
    return best


def _error(weight: NumpyArray, params: QParams, spec: TensorSpec) -> NumpyArray:
    """|W - W'|^p of each value."""
    rounded = np.asarray(dequantize(quantize(weight, params, spec), params, spec))
    return np.asarray(np.abs(weight - rounded) ** np.float32(NORM))
