"""What is made without samples wins where it is the more exact, and no slower or larger; never else."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import onnx
import pytest

from quark.commands.results.tables import recovery_line
from quark.core.metrics import Metric, sqnr
from quark.onnx import ModelQuantizer
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.settings import Settings
from quark.onnx.flow.prepare import prepare
from quark.onnx.graph.model_file import load
from quark.onnx.search.evaluator import LOST, Evaluator, PartScorer
from quark.onnx.search.recovery import alternative as module
from quark.onnx.search.recovery import preference
from quark.onnx.search.recovery.alternative import Alternative, ScoredModel
from quark.onnx.search.recovery.preference import PREFERENCES, Costs
from quark.onnx.search.recovery.search import recover
from quark.onnx.search.recovery.steps import QUICK_STEPS
from quark.onnx.search.settle import convert
from tests.models.onnx_events import event_case
from tests.models.onnx_zoo import cnn, images, outputs

ENOUGH = 40.0
"""dB of probabilities: an error of a hundredth, where decisions are taken at a half."""


def made_with_samples(lost: bool = False) -> tuple[ScoredModel, PartScorer, Samples]:
    """A model of static integers; one of which so much is lost that the task suffers."""
    settings = prepare(model := load(cnn()), ModelQuantizer("INT8_CPU").settings)
    data = Samples(images(6), model_inputs(model))
    scorer = PartScorer(model, data, Metric("sqnr"), settings)
    made = convert(Prepared(model.clone(), data), settings)
    score, part = scorer.score(made)[:2]
    return ScoredModel(settings, made, LOST - 1 if lost else max(score, LOST + 1), part, 0.0), scorer, data


@pytest.mark.parametrize(
    ("ratios", "wins"),
    [((1.3,), True), ((0.95,) * 3, True), ((0.5,), False), ((0.8,) * 3, False), ((0.86, 0.97, 0.95), True)],
)
def test_static_integers_are_worth_their_loss_where_they_win_time(
    ratios: tuple[float, ...], wins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one look at the time of both, or by the median of three where that is near the bound."""
    other, scorer, data = made_with_samples()
    asked = iter(ratios)
    monkeypatch.setattr(module, "time_ratio", lambda *_: next(asked))
    found = Alternative(load(cnn()), ModelQuantizer("INT8_CPU_WEIGHTS").settings).instead_of(
        other, scorer, data, at_last=True
    )
    assert (found is not None) == wins and next(asked, None) is None
    if found is not None:
        assert found.score > other.score


@pytest.mark.parametrize(
    ("costs", "without"),
    [
        (Costs(True, 0.8, 1.0), {"accuracy"}),
        (Costs(True, 0.95, 1.0), {"between", "accuracy", "size"}),
        (Costs(True, 0.99, 1.01), {"between", "speed", "accuracy", "size"}),
        (Costs(True, 1.3, 1.1), {"speed", "accuracy"}),
        (Costs(True, 0.5, 0.9), {"accuracy", "size"}),
        (Costs(False, 0.99, 1.0), set()),
        (Costs(False, 1.3, 0.9), {"speed", "size"}),
    ],
)
def test_each_preference_takes_what_it_says_of_the_same_two_files(costs: Costs, without: set[str]) -> None:
    assert {name for name, wins in PREFERENCES.items() if wins(costs)} == without


def test_the_faster_or_smaller_file_wins_though_it_is_less_exact_unless_its_task_suffers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other, scorer, data = made_with_samples()
    exact = replace(other, score=np.inf)
    monkeypatch.setattr(module, "time_ratio", lambda *_: 1.3)

    def wins(name: str) -> bool:
        alternative = Alternative(load(cnn()), ModelQuantizer("INT8_CPU_WEIGHTS").settings, name)
        return alternative.instead_of(exact, scorer, data, at_last=True) is not None

    assert {name for name in PREFERENCES if wins(name)} == {"speed", "size"}
    assert "(--prefer between: with; --prefer speed: without; --prefer accuracy: with)" in caplog.text
    monkeypatch.setattr(PartScorer, "is_lost", lambda *_: True)
    assert not any(map(wins, PREFERENCES))


@pytest.mark.parametrize("at_last", [False, True])
def test_no_time_makes_up_for_a_lost_task(at_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as steps may better it, time counts."""
    monkeypatch.setattr(module, "time_ratio", lambda *_: 0.2)
    alternative = Alternative(load(cnn()), ModelQuantizer("INT8_CPU_WEIGHTS").settings)
    assert (alternative.instead_of(*made_with_samples(lost=True), at_last=at_last) is not None) == at_last


def test_no_time_makes_up_for_a_larger_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be as much larger as MORE says: here none that is larger than a tenth."""
    monkeypatch.setattr(module, "time_ratio", lambda *_: 1.3)
    monkeypatch.setattr(preference, "MORE", -0.9)
    alternative = Alternative(load(cnn()), ModelQuantizer("INT8_CPU_WEIGHTS").settings)
    assert alternative.instead_of(*made_with_samples(), at_last=True) is None


def test_what_is_less_exact_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time_ratio", lambda *_: pytest.fail("it was timed"))
    model = load(cnn())
    settings = prepare(model, ModelQuantizer("INT8_CPU").settings)
    data = Samples(images(4), model_inputs(model))
    scorer = PartScorer(model, data, Metric("sqnr"), settings)
    exact = ScoredModel(settings, model, np.inf, scorer.score(model)[1], 0.0)
    assert Alternative(load(cnn()), ModelQuantizer("INT8_CPU_WEIGHTS").settings).instead_of(exact, scorer, data) is None


def test_it_is_looked_at_when_the_time_of_a_search_has_ended() -> None:
    """The samples then still say that no time is left."""
    data = Samples(images(6), model_inputs(load(cnn())))
    settings = ModelQuantizer("INT8_CPU").settings
    alternative = Alternative(load(cnn()), ModelQuantizer("INT8_CPU_WEIGHTS").settings)
    found, _ = recover(
        load(cnn()), settings, data, Metric("sqnr"), 90.0, 1e-3, QUICK_STEPS, quick=True, alternative=alternative
    )
    assert found.score >= found.plain


def test_a_config_that_gave_way_at_once_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time_ratio", lambda *_: 1.3)
    made, evaluated = list[Settings](), Evaluator.made
    monkeypatch.setattr(Evaluator, "made", lambda self, *args: made.append(args[0]) or evaluated(self, *args))
    settings = ModelQuantizer("INT8_CPU").settings
    alternative = Alternative(load(cnn()), ModelQuantizer("INT8_CPU_WEIGHTS").settings)
    found, _ = recover(load(cnn()), settings, images(8), Metric("sqnr"), steps=[], quick=True, alternative=alternative)
    assert found.by_turns == 8 and len(made) == 1
    # There is no figure of it on these samples, and the line has none.
    assert math.isnan(found.plain) and "nan" not in recovery_line(found) and "->" not in recovery_line(found)


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param(kind, seed, marks=[] if (kind, seed) == ("map", 0) else [pytest.mark.slow])
        for kind in ("probability", "map", "joined")
        for seed in range(6)
    ],
)
def test_a_detector_of_rare_events_is_no_worse_with_samples_than_without(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the few samples hold events (seeds 1, 3 and 5) or not, and though what ranges make is five times as fast.

    The judgment is over all samples, in the probabilities that decisions are taken by.
    """
    monkeypatch.setattr(module, "time_ratio", lambda *_: 0.2)
    case = event_case(kind, seed, spoiled=False, count=360)
    feed = {"x": np.concatenate([feed["x"] for feed in case.feeds])}

    def kept(model: onnx.ModelProto) -> float:
        return sqnr(*(outputs(one, feed)[0][..., -1] for one in (case.model, model)))

    with_samples, without = (ModelQuantizer(name) for name in ("INT8_CPU", "INT8_CPU_DYNAMIC"))
    for quantizer in (with_samples, without):
        quantizer.settings = replace(quantizer.settings, least_sqnr=None)
    found = with_samples.recover(case.model, None, case.feeds[:24], quick=True, without_samples=without)
    other = without.quantize_model(case.model)
    assert found.model is not None and other is not None
    assert kept(found.model) >= min(kept(other), ENOUGH)
