"""Weights alone come before the steps of static integers where these have no hope, and else behind them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from quark.core.metrics import Metric
from quark.onnx import ModelQuantizer
from quark.onnx.config.settings import MeasurementSettings, Settings
from quark.onnx.graph.model_file import load
from quark.onnx.search.history import TimeBudget
from quark.onnx.search.recovery.search import REACH, RESERVE, Recovery, WeightsAlone, _Search, recover
from quark.onnx.search.recovery.steps import Step
from tests.models.onnx_zoo import Builder

STEP = "a step of static integers"


def spectrum() -> tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]:
    """A logarithm asks for the small values, of which one scale for all leaves nothing."""
    b, size = Builder(), 32
    power = b.node("MatMul", ["x", b.constant("w", b.random.uniform(0.1, 1, (size, size)))], "power")
    # With a Relu it is no front end, which stays in float from the first.
    log = b.node("Log", [b.node("Relu", [power], "relu")], "y")
    model = b.model({"x": ["n", size]}, {log: ["n", size]})
    amplitude = b.random.normal(0, 8, (16, 1)) + b.random.normal(0, 1, (16, size))
    return model, [{"x": row[None]} for row in np.exp(amplitude).astype(np.float32)]


def settings_of(preset: str) -> Settings:
    return replace(ModelQuantizer(preset).settings, measurement=MeasurementSettings(), least_sqnr=None)


def found(weights: str, target: float | None = None) -> tuple[Recovery, list[str]]:
    """What is found, and the names of what was tried."""
    model, feeds = spectrum()
    apart = WeightsAlone(load(model), settings_of(weights))
    step = Step(STEP, lambda settings, _: "tried")
    best, _ = recover(
        load(model), settings_of("INT8_CPU"), feeds, Metric("sqnr"), target, steps=[step], quick=True, weights=apart
    )
    return best, [trial.step for trial in best.trials]


def test_steps_that_cannot_make_up_for_what_is_lost_are_left_out() -> None:
    best, tried = found("INT8_CPU_WEIGHTS")
    assert best.plain + REACH < best.score
    assert tried == ["the config as it is", "weights alone in integers"]


@pytest.mark.parametrize(("weights", "target"), [("INT8_CPU", None), ("INT8_CPU_WEIGHTS", 90.0)])
def test_they_are_tried_where_weights_alone_lose_as_much_or_there_is_a_target(
    weights: str, target: float | None
) -> None:
    """The second model is one of static integers, too."""
    _, tried = found(weights, target)
    assert tried == ["the config as it is", STEP, "weights alone in integers"]


@dataclass(frozen=True)
class Best:
    """A model with what its score is compared by."""

    score: float = 3.0


@pytest.mark.parametrize(
    ("lost", "ahead", "needed"), [(True, REACH, True), (True, REACH + 1, False), (False, 1.0, False)]
)
def test_steps_are_needed_where_they_may_reach_what_weights_alone_give(lost: bool, ahead: float, needed: bool) -> None:
    """Of two that are lost both; one that is not makes all steps needless."""
    search: Any = SimpleNamespace(
        target=None, budget=TimeBudget(lambda: 0.0), fit=SimpleNamespace(clock=lambda: 0.0),
        best=Best(), scorer=SimpleNamespace(is_far=lambda made, gain: (made.score, gain) == (3.0, REACH)),
    )  # fmt: skip
    other: Any = SimpleNamespace(lost=lost, score=3.0 + ahead)
    made: Any = SimpleNamespace(recovery=other)
    assert _Search.needs_steps(search, lambda: made) is needed


def test_the_last_resort_has_all_of_the_time_that_is_left() -> None:
    search: Any = SimpleNamespace(target=30.0, best=SimpleNamespace(seconds=2.0), budget=TimeBudget(lambda: 1.0, 11.0))
    step = Step(STEP, lambda settings, _: settings)
    assert _Search.left(search, replace(step, last_resort=True)) == 10
    assert _Search.left(search, step) == 10 - 2 * RESERVE
    search.target = None
    assert _Search.left(search, step) == 10


@pytest.mark.parametrize(("better", "kept"), [(True, {"new"}), (False, {"old"})])
def test_statistics_are_those_of_the_best_model(better: bool, kept: set[str]) -> None:
    search: Any = SimpleNamespace(_statistics={"old": 1, "new": 2})
    _Search._forget(search, {"old"}, better)
    assert search._statistics.keys() == kept
    _Search._forget(search, kept, better)
    assert search._statistics.keys() == kept
