"""Data of many shapes, and the true error of a range on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quark.core.observers import OBSERVERS
from quark.core.quantize import fake_quantize
from quark.core.scales import QParams, qparams_from_range
from quark.core.spec import TensorSpec, spec

RNG = np.random.default_rng
DATA: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "bell": lambda rng, n: rng.standard_normal(n),
    "heavy": lambda rng, n: rng.standard_t(2, n),
    "laplace": lambda rng, n: rng.laplace(3.0, 1.0, n),
    "relu": lambda rng, n: np.maximum(rng.standard_t(3, n), 0),
    "outliers": lambda rng, n: np.where(rng.random(n) < 1e-3, 60, 1) * rng.standard_normal(n),
    "skewed": lambda rng, n: -rng.lognormal(0, 1.5, n),
    "spike": lambda rng, n: np.where(np.arange(n) % 5000 == 7, 20, rng.standard_normal(n)),
    "tiny": lambda rng, n: rng.standard_t(4, n) * 1e-2,
}
EVERY_DATA = pytest.mark.parametrize("kind", DATA)
GRIDS = {
    "int8": spec("int8"),
    "uint8": spec("uint8", symmetric=False),
    "int4": spec("int4"),
    "uint4": spec("uint4", symmetric=False),
    "fp8": spec("fp8_e4m3"),
    "fp4": spec("fp4_e2m1"),
}
EVERY_GRID = pytest.mark.parametrize("tensor", GRIDS.values(), ids=GRIDS)


def values(kind: str, n: int = 60_000, seed: int = 0) -> np.ndarray:
    return DATA[kind](RNG(seed), n).astype(np.float32)


def ranged(name: str, tensor: TensorSpec, x: np.ndarray, **options: float) -> tuple[float, float]:
    observer = OBSERVERS[name](tensor, **options)
    for part in np.array_split(x, 3):
        observer.update(part)
    low, high = observer.range()
    return float(low), float(high)


def error_of(x: np.ndarray, params: QParams, tensor: TensorSpec) -> float:
    """True squared error over the raw data."""
    y = fake_quantize(x, params, tensor)
    return float(((x.astype(np.float64) - y) ** 2).sum())


def error_of_range(x: np.ndarray, low: float, high: float, tensor: TensorSpec) -> float:
    params = qparams_from_range(np.float32(low)[...], np.float32(high)[...], tensor)
    return error_of(x, params, tensor)
