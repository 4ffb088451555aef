"""The certain part of a mean, against the standard library's statistics."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch

from quark.core.solvers.bias_correction import certain_mean
from quark.errors import CalibrationError


def test_the_mean_is_shrunk_by_its_uncertainty() -> None:
    random = np.random.default_rng(0)
    for count in (16, 40):
        samples = random.normal(1.0, 2.0, (count, 5)) + np.array([0.0, 0.5, 2.0, 5.0, -9.0])
        found = certain_mean(samples)
        for channel, values in enumerate(samples.T.tolist()):
            mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(count)
            share = max(0.0, 1 - 4 * error**2 / mean**2)
            assert found[channel] == pytest.approx(mean * share, abs=1e-12)
        assert np.allclose(found, certain_mean(torch.from_numpy(samples)).numpy())


def test_a_sure_mean_is_taken_whole_and_noise_not_at_all() -> None:
    random = np.random.default_rng(1)
    assert np.array_equal(certain_mean(np.full((16, 3), -0.25)), np.full(3, -0.25))
    assert not certain_mean(np.zeros((16, 3))).any()
    noise = np.stack([certain_mean(random.normal(size=(16, 1000))) for _ in range(20)])
    # What noise adds to the error of single examples, whose variance is 1.
    assert (noise**2).mean() < 0.01
    assert np.abs(certain_mean(random.normal(0.5, 1, (400, 100))) - 0.5).mean() < 0.1


def test_too_few_examples_are_refused() -> None:
    with pytest.raises(CalibrationError, match="at least 8 examples .* got 7"):
        certain_mean(np.ones((7, 2)))
