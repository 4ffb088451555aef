"""Metrics against their formulas, written directly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quark.core.metrics import (
    UNITS,
    Comparison,
    Metric,
    cosine,
    decibel,
    is_distribution,
    kl,
    l2,
    logits_of,
    psnr,
    scores_of,
    sqnr,
)
from quark.errors import ConfigError

X = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
Y = (X + 0.1 * np.random.default_rng(1).standard_normal((5, 7))).astype(np.float32)
LIBRARIES = pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])


@LIBRARIES
def test_formulas(library: object) -> None:
    x, y = library(X), library(Y)  # type: ignore[operator]
    a, b = X.astype(np.float64).ravel(), Y.astype(np.float64).ravel()
    noise = a - b
    assert sqnr(x, y) == pytest.approx(10 * math.log10(a @ a / (noise @ noise)))
    assert psnr(x, y) == pytest.approx(10 * math.log10(abs(a).max() ** 2 / (noise @ noise / a.size)))
    assert cosine(x, y) == pytest.approx(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
    assert l2(x, y) == pytest.approx(np.linalg.norm(noise))
    p, q = (np.exp(part.astype(np.float64)) for part in (X, Y))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    assert kl(x, y) == pytest.approx((p * np.log(p / q)).sum(1).mean())
    for metric in (sqnr, psnr, cosine, l2, kl):
        assert isinstance(metric(x, y), float)


@LIBRARIES
def test_edges(library: object) -> None:
    x, zero = library(X), library(np.zeros_like(X))  # type: ignore[operator]
    assert sqnr(x, x) == math.inf == psnr(x, x) and l2(x, x) == 0 and cosine(x, x) == pytest.approx(1)
    assert sqnr(zero, x) == -math.inf and sqnr(zero, zero) == math.inf
    assert cosine(zero, zero) == 1 and cosine(zero, x) == 0 == cosine(x, zero)
    assert cosine(x, -x) == pytest.approx(-1)
    assert kl(x, x) == 0 and kl(x * 1e4, x * 1e4 + 7) == pytest.approx(0, abs=1e-9)
    assert decibel(100, 1) == 20 and decibel(0, 0) == math.inf and decibel(0, 1) == -math.inf
    assert decibel(1, math.inf) == -math.inf and decibel(math.inf, 1) == math.inf and math.isnan(decibel(math.nan, 1))


def test_sums_are_wide() -> None:
    """Half-precision inputs, and values whose squares leave float32."""
    x = torch.full((70_000,), 100.0, dtype=torch.float16)
    assert l2(x, x * 0) == pytest.approx(100 * math.sqrt(70_000))
    assert sqnr(x, x + 1) == pytest.approx(40)
    big = np.full(4, 1e30, np.float32)
    assert sqnr(big, big * np.float32(0.9)) == pytest.approx(20, abs=1e-4)
    assert cosine(big, big) == pytest.approx(1)
    fine = np.ones(4)
    assert l2(fine, fine + 1e-9) == l2(fine + 1e-9, fine) == pytest.approx(2e-9)


def test_pairs_that_come_one_by_one_count_as_one() -> None:
    parts = Comparison()
    for row in range(5):
        parts.update(X[row], Y[row])
    whole = {name: metric(X, Y) for name, metric in (("sqnr", sqnr), ("psnr", psnr), ("cosine", cosine), ("l2", l2))}
    assert {name: getattr(parts, name) for name in whole} == pytest.approx(whole)
    assert Comparison().update(X[:0], Y[:0]) == Comparison()


@pytest.mark.parametrize("name", UNITS)
def test_a_metric_knows_which_way_it_improves(name: str) -> None:
    metric, random = Metric(name), np.random.default_rng(0)
    x, error = random.normal(size=500), random.normal(size=500)
    near, far = (metric.of(Comparison().update(x, x + size * error)) for size in (0.01, 0.1))
    assert metric.better(near, far) and not metric.better(far, near) and not metric.better(near, near)
    assert metric.distance(near) < metric.distance(far) and metric.noise(near, 4) < metric.noise(far, 4)
    assert metric.worst_of({"near": near, "far": far, "as far": far}) == "far"
    assert metric.of(Comparison().update(x, np.full_like(x, np.nan))) == metric.worst
    assert metric.better(far, metric.worst) and metric.distance(metric.worst) == np.inf


def test_a_metric_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="There is no metric 'snr'. Did you mean 'sqnr'"):
        Metric("snr")


def test_scores_are_what_the_softmax_was_given() -> None:
    z = np.random.default_rng(0).normal(0, 5, (3, 7, 50)).astype(np.float32)
    p = torch.softmax(torch.from_numpy(z), -1).numpy()
    assert is_distribution(p) and is_distribution(p.astype(np.float16))
    assert not any(map(is_distribution, (z, p[..., :1], 1 - p, p[:0], np.float32(1), (p * 100).astype(np.int64))))
    for found in scores_of(p, p):
        np.testing.assert_allclose(found, z - z.mean(-1, keepdims=True), atol=1e-4)


def test_scores_of_probabilities_are_what_a_sigmoid_was_given() -> None:
    z = np.linspace(-15, 15, 31)
    for found in logits_of(*([1 / (1 + np.exp(-z))] * 2)):
        np.testing.assert_allclose(found, z, rtol=1e-9)


def test_scores_of_codes_are_kept_from_both_ends_by_half_a_code() -> None:
    p = np.array([1e-4, 0.3, 0.5, 0.9999])
    exact, found = logits_of(p, np.round(p * 255) / 255)
    end = np.log((1 / 510) / (1 - 1 / 510))
    np.testing.assert_allclose([found[0], exact[0], -found[3], -exact[3]], end, rtol=1e-2)
    np.testing.assert_allclose(exact[1:3], np.log(p[1:3] / (1 - p[1:3])))


def test_a_hard_sigmoid_that_is_0_is_as_far_from_a_little_as_half_its_least_value() -> None:
    exact, found = logits_of(np.array([0.0, 1e-3, 0.5]), np.array([4e-4, 1e-3, 0.5]))
    assert exact[0] == pytest.approx(found[0], abs=0.3) and exact[0] == pytest.approx(np.log(5e-4), abs=0.01)


def test_codes_that_are_all_zero_do_not_pass_for_what_they_lost() -> None:
    exact, found = logits_of(np.array([1e-3, 1e-5]), np.zeros(2))
    assert (exact - found > 5).all()


def test_scores_of_codes_are_floored_at_half_of_the_least() -> None:
    p = np.float32([[0.98, 0.019, 0.001]])
    codes = np.rint(p * 255) / np.float32(255)
    assert codes[0, 2] == 0
    exact, found = scores_of(p, codes)
    np.testing.assert_allclose(np.exp(exact[0, 2] - exact[0, 0]), codes[0, 1] / 2 / 0.98, rtol=1e-5)
    assert found[0, 2] - found[0, 0] == pytest.approx(np.log(codes[0, 1] / 2 / codes[0, 0]))
