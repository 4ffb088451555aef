"""MinMax: the smallest and the largest value ever seen. Merging is min and max."""

from __future__ import annotations

from quark.core.array import Array, namespace
from quark.core.observers.base import Observer
from quark.core.spec import TensorSpec


class MinMaxObserver(Observer):
    """Running minimum and maximum; the base statistic itself. For every granularity.

    Args:
        spec: The spec of the observed tensor.
        symmetric_range: Whether the range is [-a, a], a the largest magnitude, whatever the spec is.
    """

    def __init__(self, spec: TensorSpec, symmetric_range: bool = False) -> None:
        super().__init__(spec)
        self.symmetric_range = symmetric_range

    def range(self) -> tuple[Array, Array]:
        low, high = self.extremes()
        return symmetric(low, high) if self.symmetric_range else (low, high)


def symmetric(low: Array, high: Array) -> tuple[Array, Array]:
    """The smallest range about 0 that holds [low, high]."""
    edge = namespace(low).maximum(abs(low), abs(high))
    return -edge, edge
