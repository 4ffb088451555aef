"""MovingAverage: low = mean over batches of min(batch), high = mean over batches of max(batch).

The arithmetic mean (ONNX Runtime's `CalibMovingAverage`), not an exponential one: a mean of batches does not
depend on their order, so it can be merged.
"""

from __future__ import annotations

from collections.abc import Mapping

from quark.core.array import Array, astype
from quark.core.observers.base import Observer, needed
from quark.core.observers.min_max import symmetric
from quark.core.spec import TensorSpec


class MovingAverageObserver(Observer):
    """Mean of the batches' minima and maxima: one outlier batch moves the range by its share only.

    Args:
        spec: The spec of the observed tensor.
        symmetric_range: As for `MinMaxObserver`.
    """

    def __init__(self, spec: TensorSpec, symmetric_range: bool = False) -> None:
        super().__init__(spec)
        self.symmetric_range = symmetric_range
        self.sums: tuple[Array, Array] | None = None

    def _saw(self, x: Array, low: Array, high: Array) -> None:
        super()._saw(x, low, high)
        self._add(astype(low, "float64"), astype(high, "float64"))

    def merge(self, other: Observer) -> None:
        super().merge(other)
        if isinstance(other, MovingAverageObserver) and other.sums is not None:
            self._add(*other.sums)

    def _add(self, low: Array, high: Array) -> None:
        self.sums = (low, high) if self.sums is None else (self.sums[0] + low, self.sums[1] + high)

    def state(self) -> dict[str, Array]:
        low, high = self.sums or (None, None)
        return {**super().state(), "low_sum": low, "high_sum": high}

    def restore(self, state: Mapping[str, Array]) -> None:
        super().restore(state)
        self.sums = needed(state, "low_sum", self), needed(state, "high_sum", self)

    def range(self) -> tuple[Array, Array]:
        self.extremes()
        assert self.sums is not None
        low, high = (astype(side / self.count, "float32") for side in self.sums)
        return symmetric(low, high) if self.symmetric_range else (low, high)
