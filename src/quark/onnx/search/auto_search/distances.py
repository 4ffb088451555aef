"""How far the outputs of a quantized model are from the float ones, of which less is better, for one sample.

x, y: all outputs of the float and of the quantized model as one vector, float64.

          AutoSearchPro            AutoSearch
L2        |x - y|                  mean (x - y)^2
L1        sum |x - y|              mean |x - y|
cos       1 - cosine               (1 - cosine) / 2
psnr      -10 log10(255^2 / mean (x - y)^2)
ssim      1 - (2 mx my + c1) (2 sx sy + c2) / ((mx^2 + my^2 + c1) (sx^2 + sy^2 + c2))     m: mean, s: deviation
          c1 = (0.01 * 255)^2, c2 = (0.03 * 255)^2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from quark.core.array import NumpyArray
from quark.core.metrics import cosine, decibel
from quark.errors import ConfigError, did_you_mean

Distance = Callable[[NumpyArray, NumpyArray], float]
PEAK = 255.0


def _psnr(x: NumpyArray, y: NumpyArray) -> float:
    return -decibel(PEAK**2, float(np.mean((x - y) ** 2)))


def ssim(x: NumpyArray, y: NumpyArray) -> float:
    """Structural similarity of two arrays as a whole, for values from 0 to 255; 1 where they are equal."""
    c1, c2 = (0.01 * PEAK) ** 2, (0.03 * PEAK) ** 2
    means, deviations = (x.mean(), y.mean()), (x.std(), y.std())
    above = (2 * means[0] * means[1] + c1) * (2 * deviations[0] * deviations[1] + c2)
    below = (means[0] ** 2 + means[1] ** 2 + c1) * (deviations[0] ** 2 + deviations[1] ** 2 + c2)
    return float(above / below)


SUMS: Mapping[str, Distance] = {
    "L2": lambda x, y: float(np.linalg.norm(x - y)),
    "L1": lambda x, y: float(abs(x - y).sum()),
    "cos": lambda x, y: 1 - cosine(x, y),
    "psnr": _psnr,
    "ssim": lambda x, y: 1 - ssim(x, y),
}
MEANS: Mapping[str, Distance] = {
    **SUMS,
    "L2": lambda x, y: float(np.mean((x - y) ** 2)),
    "L1": lambda x, y: float(abs(x - y).mean()),
    "cos": lambda x, y: (1 - cosine(x, y)) / 2,
}


def distance(name: str, kinds: Mapping[str, Distance]) -> Distance:
    """A distance by name. Raises ConfigError where there is none."""
    if name not in kinds:
        raise ConfigError(f"There is no search_metric {name!r}. {did_you_mean(name, kinds)}")
    return kinds[name]
