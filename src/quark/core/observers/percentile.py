"""Percentile: the range that keeps a share of the values, cutting the same share of outliers on each side.

Symmetric: [-q, q] with q the percentile of |x|. Asymmetric: [percentile of (100 - p), percentile of p].
"""

from __future__ import annotations

from quark.core.observers.histograms.base import HistogramBasedObserver
from quark.core.observers.histograms.bit_histogram import Bins, absolute, quantile
from quark.core.spec import TensorSpec
from quark.errors import ConfigError


class PercentileObserver(HistogramBasedObserver):
    """Keeps `percentile` percent of the values (default 99.999, as ONNX Runtime); per tensor."""

    def __init__(self, spec: TensorSpec, percentile: float = 99.999) -> None:
        super().__init__(spec)
        if not 50 < percentile <= 100:
            raise ConfigError(f"percentile must be in (50, 100], got {percentile}.")
        self.percentile = percentile

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        return percentile_range(bins, self.percentile, self.spec)


def percentile_range(bins: Bins, percentile: float, spec: TensorSpec) -> tuple[float, float]:
    """The range that keeps `percentile` percent of the values."""
    share = percentile / 100
    if spec.symmetric or spec.dtype.is_float:
        edge = quantile(absolute(bins), share)
        return -edge, edge
    return quantile(bins, 1 - share), quantile(bins, share)
