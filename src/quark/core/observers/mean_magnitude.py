"""Mean magnitude: the step 2 mean|x| / sqrt(Qp) with which LSQ starts (Esser et al. 2019, arXiv:1902.08153, 2.1).

Qp is the largest code. At 8 bits that range passes far beyond the values, so it is cut to what was seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quark.core.array import Array, astype, namespace
from quark.core.observers.base import Observer, needed
from quark.core.spec import TensorSpec


class MeanMagnitudeObserver(Observer):
    """Sum and number of the magnitudes of each part; asymmetric types take the extremes."""

    def __init__(self, spec: TensorSpec) -> None:
        super().__init__(spec)
        self.total: Array = 0.0
        self.values: Any = 0

    def update(self, x: Array) -> None:
        if 0 in x.shape:
            return
        super().update(x)
        self.total = self.total + self.spec.split.sums(astype(abs(x), "float64"))
        self.values += math.prod(x.shape)

    def merge(self, other: Observer) -> None:
        super().merge(other)
        assert isinstance(other, MeanMagnitudeObserver)
        self.total, self.values = self.total + other.total, self.values + other.values

    def state(self) -> dict[str, Array]:
        return {**super().state(), "total": self.total, "values": self.values}

    def restore(self, state: Mapping[str, Array]) -> None:
        super().restore(state)
        self.total, self.values = needed(state, "total", self), needed(state, "values", self)

    def range(self) -> tuple[Array, Array]:
        low, high = self.extremes()
        dtype = self.spec.dtype
        if not (self.spec.symmetric or dtype.is_float):
            return low, high
        half = dtype.max if dtype.is_float else (dtype.max - dtype.min) / 2
        largest = dtype.max if dtype.signed else (dtype.max - dtype.min - 1) / 2
        mean = self.total * (math.prod(low.shape) / self.values)
        reach = astype(mean * (2 * half / math.sqrt(largest)), "float32")
        xp = namespace(low)
        return xp.maximum(low, -reach), xp.minimum(high, reach)
