"""Percentile: the range that keeps a share of the values, cutting the same share of outliers on each side.

Symmetric: [-q, q] with q the percentile of |x|. Asymmetric: [percentile of (100 - p), percentile of p].

`symmetric_range`, ONNX Runtime's option, says which values share the (100 - p) that are cut, whatever the spec is:
True: those of largest |x|, the range being cut to what was seen; False: half of it at either end.
"""

from __future__ import annotations

from quark.core.observers.histograms.base import HistogramBasedObserver
from quark.core.observers.histograms.bit_histogram import Bins, absolute, quantile
from quark.core.spec import TensorSpec
from quark.errors import ConfigError


class PercentileObserver(HistogramBasedObserver):
    """Keeps `percentile` percent of the values; per tensor.

    None: 99.999 as ONNX Runtime, and of symmetric ranges all but 1 / 4200 of the width, as AMD Quark: its percentile
    is 99.99999999, read off a histogram of 4200 bins at the lower edge of the bin.
    """

    def __init__(self, spec: TensorSpec, percentile: float | None = None, symmetric_range: bool | None = None) -> None:
        super().__init__(spec)
        if percentile is not None and not 50 < percentile <= 100:
            raise ConfigError(f"percentile must be in (50, 100], got {percentile}.")
        self.percentile, self.symmetric_range = percentile, symmetric_range

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        if self.percentile is None and (self.spec.symmetric or self.spec.dtype.is_float):
            edge = max(-low, high) * (1 - 1 / 4200)
            return -edge, edge
        return percentile_range(bins, self.percentile or 99.999, self.spec, self.symmetric_range)


def percentile_range(
    bins: Bins, percentile: float, spec: TensorSpec, symmetric_range: bool | None = None
) -> tuple[float, float]:
    """The range that keeps `percentile` percent of the values."""
    share = percentile / 100
    if symmetric_range:
        edge = quantile(absolute(bins), share)
        return max(-edge, float(bins.left[0])), min(edge, float(bins.right[-1]))
    if symmetric_range is False:
        return quantile(bins, (1 - share) / 2), quantile(bins, (1 + share) / 2)
    if spec.symmetric or spec.dtype.is_float:
        edge = quantile(absolute(bins), share)
        return -edge, edge
    return quantile(bins, 1 - share), quantile(bins, share)
