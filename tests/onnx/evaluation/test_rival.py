"""What is made without samples wins where it is the more exact, and no slower or larger; never else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from quark.core.metrics import Metric
from quark.onnx import ModelQuantizer
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.score import Scorer
from quark.onnx.evaluation.recovery import rival as module
from quark.onnx.evaluation.recovery.rival import Rival, ScoredModel
from quark.onnx.evaluation.recovery.search import recover
from quark.onnx.evaluation.recovery.steps import QUICK_STEPS
from quark.onnx.flow import convert
from quark.onnx.graph.model_file import load
from quark.onnx.prepare import prepare
from tests.models.onnx_zoo import cnn, images


@dataclass
class Ratio:
    ratio: float


@pytest.mark.parametrize(
    ("times", "wins"),
    [((1.0, 1.0), True), ((0.93, 0.95), True), ((0.5, 0.95), False), ((0.9, 1.0), False)],
)
def test_static_integers_are_worth_their_loss_where_they_win_time(
    times: tuple[float, float], wins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of (with samples, without): the time beside that of the float model."""
    static, without = (ModelQuantizer(name).settings for name in ("INT8_CPU", "INT8_CPU_WEIGHTS"))
    model = load(cnn())
    settings = prepare(model, static)
    data = Samples(images(6), model_inputs(model))
    scorer = Scorer(model, data, Metric("sqnr"), settings)
    made = convert(model.clone(), settings, data)
    other = ScoredModel(settings, made, *scorer.score(made), 0.0)
    asked = iter((times[1], times[0]))
    monkeypatch.setattr(module, "file_ratio", lambda *_: Ratio(next(asked)))
    found = Rival(cnn(), without).instead_of(other, scorer, data)
    assert (found is not None) == wins
    if found is not None:
        assert found.score > other.score


def test_what_is_less_exact_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "file_ratio", lambda *_: pytest.fail("it was timed"))
    model = load(cnn())
    settings = prepare(model, ModelQuantizer("INT8_CPU").settings)
    data = Samples(images(4), model_inputs(model))
    scorer = Scorer(model, data, Metric("sqnr"), settings)
    exact = ScoredModel(settings, model, np.inf, scorer.score(model)[1], 0.0)
    assert Rival(cnn(), ModelQuantizer("INT8_CPU_WEIGHTS").settings).instead_of(exact, scorer, data) is None


def test_it_is_looked_at_when_the_time_of_a_search_has_ended() -> None:
    """The samples then still say that no time is left."""
    data = Samples(images(6), model_inputs(load(cnn())))
    settings = ModelQuantizer("INT8_CPU").settings
    rival = Rival(cnn(), ModelQuantizer("INT8_CPU_WEIGHTS").settings)
    found, _ = recover(load(cnn()), settings, data, Metric("sqnr"), 90.0, 1e-3, QUICK_STEPS, quick=True, rival=rival)
    assert found.score >= found.plain
