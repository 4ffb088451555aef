"""Cross-layer equalization (Nagel et al. 2019, arXiv:1906.04721, section 4.1): channel scales of two layers in a row.

    W1' = W1 * s    b1' = b1 * s    W2' = W2 / s    s_i = sqrt(r2_i / r1_i)

r1_i is the range of output channel i of the first layer, r2_i that of input channel i of the second. Both become
sqrt(r1_i * r2_i), and the two layers together compute what they did, as long as f(s x) = s f(x) for what is between.
"""

from __future__ import annotations

import numpy as np

from quark.core.array import NumpyArray


def channel_range(weight: NumpyArray, axis: int) -> NumpyArray:
    """Largest magnitude of each slice along `axis`, 0 of an empty one; float64."""
    others = tuple(i for i in range(weight.ndim) if i != axis % weight.ndim)
    return np.abs(weight).max(axis=others, initial=0).astype(np.float64)


def equalizing_scale(first: NumpyArray, second: NumpyArray, threshold: float = 0.0) -> NumpyArray:
    """The scale of each channel, to multiply the first layer by.

    Args:
        first: Range of the output channels of the first layer, shape (channels,).
        second: Range of the input channels of the second layer, shape (channels,).
        threshold: A channel whose two ranges sum to less keeps its scale.

    Returns:
        float64, shape (channels,); 1 where a range is 0.
    """
    keep = (first <= 0) | (second <= 0) | (first + second < threshold)
    return np.where(keep, 1.0, np.sqrt(np.where(keep, 1.0, second) / np.where(keep, 1.0, first)))
