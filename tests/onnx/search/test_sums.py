"""How sure a figure of few samples is: its bound holds for new data, and decisions count by their margins."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from quark.core.metrics import Comparison, Metric
from quark.onnx.graph.output_parts import OutputPart
from quark.onnx.search.sums import LEVEL, kept_decisions, share_kept, spread, t_quantile, total, worst_part

PART = OutputPart("y")
SQNR = Metric("sqnr")


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 31])
def test_the_quantile_is_that_of_student(freedom: int) -> None:
    assert t_quantile(freedom, LEVEL) == pytest.approx(stats.t.ppf(LEVEL, freedom), abs=2e-3)


def test_new_data_are_no_worse_than_the_bound_as_often_as_it_says() -> None:
    random, held = np.random.default_rng(0), 0
    for _ in range(200):
        sums = [{PART: Comparison(1, 1.0, 0, 0, noise)} for noise in random.lognormal(0, 0.7, 12)]
        least = worst_part(SQNR, total(sums))[0] - spread(SQNR, sums)
        held += least < -10 * np.log10(np.exp(0.7**2 / 2))
    assert 0.85 <= held / 200 <= 0.95


def test_one_sample_and_values_that_are_not_finite_have_no_spread() -> None:
    one, lost = ({PART: Comparison(1, 1.0, 0, 0, noise)} for noise in (0.1, np.inf))
    assert spread(SQNR, [one]) == spread(SQNR, [one, lost, lost]) == 0.0


def test_decisions_are_kept_as_often_as_other_noise_of_that_size_keeps_them() -> None:
    random = np.random.default_rng(0)
    x = random.normal(0, 1, (400, 6))
    seen, other = (x + random.normal(0, 0.15, x.shape) for _ in range(2))
    kept, count = kept_decisions(x, seen)
    same = [(each.argmax(-1) == x.argmax(-1)).mean() for each in (seen, other)]
    assert kept / count == pytest.approx(np.prod(same), abs=0.03) and count == 400
    assert kept_decisions(x, x) == (400, 400)


def test_a_lead_of_less_than_the_noise_is_no_decision_that_is_kept() -> None:
    scores = np.array([[2.0, 1.9, -1.0]])
    kept, _ = kept_decisions(scores, scores + np.array([0.3, -0.2, 0.0]))
    assert kept < 0.8
    assert share_kept([{PART: (kept, 1)}, {PART: (1.0, 1)}]) == pytest.approx((kept + 1) / 2)
