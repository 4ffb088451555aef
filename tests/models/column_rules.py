"""Element types and problems that the tests of the column solvers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerChannel, PerGroup
from quark.core.quantize import compute_qparams, elementwise
from quark.core.solvers.columns import columns
from quark.core.solvers.columns.columns import ColumnGrid
from quark.core.spec import TensorSpec, spec


def all_rules() -> list[TensorSpec]:
    """One spec of every element type that has a scale, and the integers under all kinds of zero points."""
    group = PerGroup(-1, 8)
    found = []
    for dtype in DTYPES.values():
        if dtype.name in ("float16", "bfloat16") or dtype.block:
            continue
        found.append(spec(dtype.name, group))
        if not dtype.is_float:
            found += [spec(dtype.name, group, symmetric=False)]
            found += [spec(dtype.name, group, symmetric=False, float_zero_point=True)]
    return [*found, spec("mxint8", PerGroup(-1, 8)), spec("int4", PerChannel(0))]


RULES = [rule for rule in all_rules() if columns.has_rule(rule)]
"""Those that loops know."""


def grid_of(weight: np.ndarray, rule: TensorSpec, wrap: Callable[[np.ndarray], Any], shared: int = 1) -> ColumnGrid:
    """The grid of a weight, (rows, columns), from its own range."""
    scale, zero = elementwise(compute_qparams(weight, rule), rule, weight.shape)
    return ColumnGrid(rule, *(None if x is None else wrap(np.ascontiguousarray(x.T)) for x in (scale, zero)), shared)


def weights(rows: int, size: int, seed: int = 0) -> np.ndarray:
    """Rows of very different sizes, (rows, columns), float32."""
    random = np.random.default_rng(seed)
    return np.float32(random.normal(size=(rows, size)) * 10.0 ** random.integers(-3, 3, (rows, 1)))
