"""The statistical ranges against the literature and brute force."""

from __future__ import annotations

import numpy as np
import pytest

from quark.core.observers import OBSERVERS
from quark.core.observers.distribution import best_clip
from quark.core.observers.layerwise_percentile import LayerwisePercentileObserver
from quark.core.quantize import dequantize, quantize
from quark.core.scales import qparams_from_range
from quark.core.spec import spec
from quark.errors import ConfigError


@pytest.mark.parametrize(("bits", "k"), [(2, 1.71), (3, 2.15), (4, 2.55), (5, 2.93), (6, 3.28), (7, 3.61), (8, 3.92)])
def test_best_clip_is_the_papers_table(bits: int, k: float) -> None:
    """Banner et al. 2019, Gaussian prior."""
    assert best_clip(bits) == pytest.approx(k, abs=0.01)


def test_distribution_ignores_an_outlier() -> None:
    x = np.random.default_rng(0).normal(1.0, 2.0, 100_000).astype(np.float32)
    x[0] = 20.0
    observer = OBSERVERS["distribution"](spec("uint8", symmetric=False))
    observer.update(x)
    low, high = observer.range()
    assert float(high) == pytest.approx(1 + 3.92 * 2, abs=0.1) and float(low) == pytest.approx(1 - 3.92 * 2, abs=0.1)
    signed = OBSERVERS["distribution"](spec("int8"))
    signed.update(x)
    assert float(signed.range()[1]) == pytest.approx(1 + 3.92 * 2, abs=0.1)


@pytest.mark.parametrize("metric", ["mae", "mse"])
@pytest.mark.parametrize("tails", [2, 8])
def test_layerwise_percentile_takes_the_best_candidate(metric: str, tails: int) -> None:
    x = np.random.default_rng(1).standard_t(tails, 200_000).astype(np.float32)
    tensor, candidates = spec("int8"), (99.0, 99.9, 99.99, 100.0)
    errors = []
    for candidate in candidates:
        edge = np.float32(np.percentile(np.abs(x), candidate))
        params = qparams_from_range(-edge, edge, tensor)
        difference = np.abs(dequantize(quantize(x, params, tensor), params, tensor) - x)
        errors.append(float((difference ** (1 if metric == "mae" else 2)).mean()))
    observer = LayerwisePercentileObserver(tensor, candidates, metric)
    observer.update(x)
    expected = np.percentile(np.abs(x), candidates[int(np.argmin(errors))])
    assert float(observer.range()[1]) == pytest.approx(float(expected), rel=0.02)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="metric"):
        LayerwisePercentileObserver(spec("int8"), metric="mea")
    with pytest.raises(ConfigError, match="candidates"):
        LayerwisePercentileObserver(spec("int8"), (0.99,))
