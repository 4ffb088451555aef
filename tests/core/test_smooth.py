"""Scales and steps chosen from second moments, against the data that they stand for."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from quark.core.array import to_numpy
from quark.core.granularity import PerGroup
from quark.core.quantize import fake_quantize, range_of
from quark.core.scales import qparams_from_range
from quark.core.solvers import smooth
from quark.core.solvers.smooth import (
    FACTORS,
    SPREAD,
    STEPS,
    best_scale,
    best_steps,
    equalizing_scale,
    gram_loss,
    salience_scale,
    search,
)
from quark.core.solvers.smooth import smoothing_scale as smoothing
from quark.core.spec import spec

INT3 = spec("int3", PerGroup(-1, 8))


def data(channels: int = 16, tokens: int = 200, seed: int = 0) -> np.ndarray:
    """Correlated activations with two salient channels."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, channels)) @ rng.normal(size=(channels, channels))
    x[:, [2, 11]] *= 25
    return x.astype(np.float32)


def weight(rows: int = 6, channels: int = 16, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, channels)).astype(np.float32)


def moments(x: np.ndarray) -> np.ndarray:
    return (x.T @ x / len(x)).astype(np.float32)


def test_the_smoothing_scale_is_the_papers() -> None:
    act, w = np.array([4.0, 0.0, 9.0, 1e-9]), np.array([2.0, 1.0, 0.0, 1.0])
    found = smoothing(act, w, 0.5, 1e-3)
    assert np.allclose(found, [4**0.5 / 2**0.5, 1, 1, 1e-3])
    assert np.allclose(smoothing(torch.tensor(act), torch.tensor(w), 0.5).numpy(), found)
    assert np.allclose(smoothing(act, w, 1.0), [4, 1, 1, 1e-3])


@pytest.mark.parametrize("block", [512, 5])
def test_the_loss_is_the_mean_squared_error_of_the_output(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smooth, "BLOCK", block)
    x, e = data(), weight()
    assert np.allclose(gram_loss(e, moments(x)), ((x @ e.T) ** 2).mean(0), rtol=1e-4)


@pytest.mark.parametrize("least", [0, 1, 7, 13, 19])
def test_the_search_finds_the_least_of_a_valley(least: int) -> None:
    assert search(lambda i: 1 + (i - least) ** 2) == least


def output_error(x: np.ndarray, w: np.ndarray, s: np.ndarray) -> float:
    """What the scale leaves of the quantization error, on the data itself."""
    return float((((x / s) @ fake_quantize(w * s, None, INT3).T - x @ w.T) ** 2).sum() / len(x))


@pytest.mark.parametrize("library", [np.asarray, torch.as_tensor])
def test_the_scale_is_the_best_of_all_exponents_on_the_data(library) -> None:  # type: ignore[no-untyped-def]
    x, w = data(), weight()
    mean = np.abs(x).mean(0)
    found = best_scale(
        [library(w)], [lambda v: fake_quantize(v, None, INT3)], library(moments(x)), library(mean), lambda s: s
    )
    losses = [output_error(x, w, salience_scale(mean, i / STEPS)) for i in range(STEPS)]
    best = int(np.argmin(losses))
    assert best > 0 and losses[best] < 0.8 * losses[0]
    assert np.allclose(to_numpy(found), salience_scale(mean, best / STEPS), rtol=1e-5)


def test_a_scale_that_gains_little_is_not_used() -> None:
    x = np.random.default_rng(0).normal(size=(400, 64)).astype(np.float32)
    w, mean = weight(256, 64), np.abs(x).mean(0)
    losses = [output_error(x, w, salience_scale(mean, i / STEPS)) for i in range(STEPS)]
    assert min(losses) > 0.95 * losses[0]
    assert best_scale([w], [lambda v: fake_quantize(v, None, INT3)], moments(x), mean, lambda s: s) is None


def steps_of(x: np.ndarray, w: np.ndarray, library) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[no-untyped-def]
    """The factors found, and the errors of all rows for every combination of them."""
    values = library(w)
    low, high = range_of(values, INT3)

    def params(factors, rows):  # type: ignore[no-untyped-def]
        return qparams_from_range(low[rows] * factors, high[rows] * factors, INT3)

    def quantize(factors):  # type: ignore[no-untyped-def]
        return fake_quantize(values, params(factors, slice(None)), INT3)

    return to_numpy(best_steps(values, library(moments(x)), params, INT3, 2, rows=4)), quantize


@pytest.mark.parametrize("library", [np.asarray, torch.as_tensor])
def test_no_other_step_of_a_group_would_be_better(library) -> None:  # type: ignore[no-untyped-def]
    x, w = data(), weight()
    factors, quantize = steps_of(x, w, library)

    def errors(c: np.ndarray) -> np.ndarray:
        wrong = to_numpy(quantize(library(c.astype(np.float32)))) - w
        return ((x @ wrong.T) ** 2).mean(0)

    found, plain = errors(factors), errors(np.ones_like(factors))
    assert (found <= plain * 1.0001).all() and found.sum() < 0.8 * plain.sum()
    for group, factor in itertools.product(range(2), FACTORS):
        other = factors.copy()
        other[:, group] = factor
        assert (errors(other) >= found * 0.999).all(), "coordinate descent has ended"


def test_the_equalizing_scale_is_that_of_the_least_error_of_blocks() -> None:
    """No other scale has a smaller sum over blocks of inputs' times weights' energy, whatever the blocks are."""
    draw = np.random.default_rng(0)
    inputs, weights = (np.exp(3 * draw.standard_normal(64)).astype(np.float32) for _ in range(2))
    s = equalizing_scale(inputs, weights)
    assert np.exp(np.log(s).mean()) == pytest.approx(1, rel=1e-5)
    ratio = inputs / s**2 / (weights * s**2)
    assert ratio.max() == pytest.approx(ratio.min(), rel=1e-4)

    def loss(scale: Any, size: int) -> float:
        energy, read = ((x.reshape(-1, size)).sum(1) for x in (inputs / scale**2, weights * scale**2))
        return float((energy * read).sum())

    for size in (16, 32):
        for power in (0.9, 1.1):
            assert loss(s, size) < loss(s**power, size)
        assert loss(s, size) < 0.5 * loss(np.ones_like(s), size)


def test_a_dead_channel_is_not_equalized_and_no_scale_is_endless() -> None:
    s = equalizing_scale(np.array([0, 1, 1e30, 1e-30], np.float32), np.array([1, 0, 1, 1], np.float32))
    assert s.tolist() == [1, 1, SPREAD, np.float32(1 / SPREAD)]
