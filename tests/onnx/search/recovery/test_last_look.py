"""What steps are chosen by is not what is reported, and a step has to gain more than samples differ by."""

from __future__ import annotations

import numpy as np
import pytest

from quark.core.metrics import Comparison, Metric
from quark.onnx.graph.output_parts import OutputPart
from quark.onnx.search.recovery.gain import is_sure
from quark.onnx.search.recovery.search import ENOUGH
from quark.onnx.search.recovery.steps import Step, ranges
from tests.models.onnx_zoo import mlp, vectors
from tests.onnx.search.recovery.test_recover import found, measured, weights_of

PART = OutputPart("y")
CHOSEN, LAST = range(3, ENOUGH, 4), range(1, ENOUGH, 8)


def sums(*noises: float) -> list[dict[OutputPart, Comparison]]:
    """Samples of one signal."""
    x = np.ones(8)
    return [{PART: Comparison().update(x, x + noise)} for noise in noises]


@pytest.mark.parametrize(
    ("after", "sure"),
    [
        ((0.09, 0.18, 0.36, 0.72), True),  # a tenth less of each
        ((0.12, 0.23, 0.46, 0.75), False),  # the loudest alone is quieter, which makes up for all others
        ((0.1, 0.2, 0.4, 0.8), False),
        ((0.2, 0.3, 0.5, 0.9), False),
    ],
)
def test_a_gain_is_sure_where_most_samples_have_it(after: tuple[float, ...], sure: bool) -> None:
    assert is_sure(Metric("sqnr"), sums(0.1, 0.2, 0.4, 0.8), sums(*after)) is sure


def test_one_sample_and_values_that_are_not_finite_tell_no_error() -> None:
    assert is_sure(Metric("l2"), sums(0.2), sums(0.1)) and not is_sure(Metric("l2"), sums(0.1), sums(0.2))
    assert is_sure(Metric("sqnr"), sums(np.inf, 1.0), sums(0.1, 0.1))


def test_the_score_is_of_samples_that_no_step_was_chosen_by() -> None:
    feeds = vectors(ENOUGH)
    result = found(mlp(), feeds, weights_of("int16"))
    assert (result.fitted, result.held_out, result.last_looked) == (20, 8, 4)
    expected = [measured("sqnr", mlp(), result.model, [feeds[i] for i in each]) for each in (LAST, CHOSEN)]
    assert [result.score, result.trials[1].after] == pytest.approx(expected, abs=0.02)
    assert found(mlp(), feeds[:-1]).last_looked == 0


def test_the_plain_config_comes_back_where_it_is_better_on_them() -> None:
    """A range that cuts off large values gains where there are none, as in the samples that steps are chosen by."""
    feeds = [{"x": feed["x"] * np.float32(0.3 if i in CHOSEN else 1)} for i, feed in enumerate(vectors(ENOUGH))]
    cut = Step("cut", ranges("percentile", 90.0))
    plain, step, *last = found(mlp(), feeds, cut).trials
    assert step.after is not None and step.after > plain.after and step.result == "kept"
    assert [trial.result for trial in last] == ["kept"] and "no step was chosen by" in last[0].step
    result = found(mlp(), feeds, cut)
    assert result.score == result.plain and result.settings == found(mlp(), feeds).settings
