"""MinMax: the smallest and the largest value ever seen. Merging is min and max."""

from __future__ import annotations

from quark.core.observers.base import Observer


class MinMaxObserver(Observer):
    """Running minimum and maximum; the base statistic itself. For every granularity."""
