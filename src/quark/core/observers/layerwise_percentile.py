"""LayerwisePercentile: of a few percentiles, for each tensor the one with the least quantization error.

The error is the mean of |x - Q(x)| or of its square, on the histogram.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quark.core.observers.histograms.base import HistogramBasedObserver, quantization_error
from quark.core.observers.histograms.bit_histogram import Bins
from quark.core.observers.percentile import percentile_range
from quark.core.spec import TensorSpec
from quark.errors import ConfigError

_POWERS = {"mae": 1, "mse": 2}


class LayerwisePercentileObserver(HistogramBasedObserver):
    """The best of `candidates` percent by `metric` ("mae" or "mse"); per tensor."""

    def __init__(
        self,
        spec: TensorSpec,
        candidates: Sequence[float] = (99.99, 99.999, 99.99999),
        metric: str = "mae",
        symmetric_range: bool | None = None,
    ) -> None:
        super().__init__(spec)
        if metric not in _POWERS:
            raise ConfigError(f"metric must be one of {', '.join(_POWERS)}, got {metric!r}.")
        if not candidates or not all(50 < candidate <= 100 for candidate in candidates):
            raise ConfigError(f"candidates must be percentiles in (50, 100], got {list(candidates)}.")
        self.candidates, self.metric, self.symmetric_range = tuple(candidates), metric, symmetric_range

    def solve(self, bins: Bins, low: float, high: float) -> tuple[float, float]:
        ranges = np.array([percentile_range(bins, share, self.spec, self.symmetric_range) for share in self.candidates])
        errors = quantization_error(bins, ranges[:, 0], ranges[:, 1], self.spec, _POWERS[self.metric])
        best = ranges[int(np.argmin(errors))]
        return float(best[0]), float(best[1])
