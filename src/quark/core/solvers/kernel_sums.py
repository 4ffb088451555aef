"""Codes of kernels whose errors cancel: the kernel step of SQuant (Guo et al., ICLR 2022), which needs no data.

    e = q - (w / s + z)      the error of each code, in steps; rounding to nearest leaves |e| <= 1/2 and any sum
    n = round(|sum of e|)    over a kernel: so many of its codes, those with the largest e of the sum's sign, go one
                             step the other way, which leaves |sum of e| <= 1/2

What a depthwise kernel reads is one channel, and neighbours in an image are nearly equal: y = sum of w x is about x
times the sum of w, so that errors of one sign add up while those that cancel do not show.
"""

from __future__ import annotations

import numpy as np

from quark.core.array import NumpyArray


def balance_sums(codes: NumpyArray, exact: NumpyArray, limits: tuple[float, float]) -> NumpyArray:
    """Codes whose errors add up to at most half a step in each kernel, where the limits of the type leave room.

    Args:
        codes: (kernels, elements), rounded to nearest; unchanged.
        exact: w / s + z of each, of the same shape.
        limits: The least and the largest code.
    """
    errors = codes.astype(np.float64) - exact
    total = errors.sum(1, keepdims=True)
    sign = np.sign(total)
    excess = errors * sign
    # A code at its limit stays: it has no other step to go to.
    stepped = codes - sign
    excess[(stepped < limits[0]) | (stepped > limits[1])] = -np.inf
    places = np.argsort(-excess, axis=1, kind="stable")
    rank = np.empty_like(places)
    np.put_along_axis(rank, places, np.arange(codes.shape[1])[None], 1)
    moved = (rank < np.rint(np.abs(total))) & (excess > 0)
    return np.where(moved, stepped, codes).astype(codes.dtype)
