"""Whether a quantized model has lost its outputs: rare events, joined parts, and the advice that is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from quark.errors import DamageError
from quark.onnx import ModelQuantizer, QConfig, QLayerConfig
from quark.onnx.config.tensor_specs import Int8Spec
from quark.onnx.graph.output_parts import OutputPart
from quark.onnx.search.lost_outputs.verdict import LEAST, Damage, Verdict, verdict_of
from tests.models.onnx_events import KINDS, EventCase, event_case
from tests.models.onnx_zoo import Array, run

EVERYDAY = {("joined", 0), ("logit", 1)}
SEEDS = 5


def right_decisions(case: EventCase, quantized: onnx.ModelProto) -> float:
    """The share of the decisions beside the usual one that both models take, over all data."""
    before, after = (
        np.concatenate([np.ravel(case.decide(run(model, feed))) for feed in case.feeds])
        for model in (case.model, quantized)
    )
    values, counts = np.unique(before, return_counts=True)
    rest = values[counts.argmax()]
    return float(((before == after) & (before != rest)).sum() / ((before != rest) | (after != rest)).sum())


def quantized(case: EventCase) -> tuple[onnx.ModelProto, Damage]:
    quantizer = ModelQuantizer("A8W8")
    made = quantizer.quantize_model(case.model, None, case.feeds)
    assert made is not None and quantizer.damage is not None
    return made, quantizer.damage


@pytest.mark.parametrize("spoiled", [False, True], ids=["right", "lost"])
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param(kind, seed, marks=() if (kind, seed) in EVERYDAY else pytest.mark.slow)
        for kind in KINDS
        for seed in range(SEEDS)
    ],
)
def test_the_verdict_on_detectors_is_that_of_their_decisions(kind: str, seed: int, spoiled: bool) -> None:
    case = event_case(kind, seed, spoiled)
    made, damage = quantized(case)
    right = right_decisions(case, made)
    assert right < 0.5 if spoiled else right > 0.9, "the case is none"
    assert damage.lost == spoiled, damage


@pytest.mark.parametrize("kind", ["logit", "joined"])
def test_events_are_looked_for_where_the_first_samples_of_a_large_model_hold_none(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four samples would hold none in most cases."""
    monkeypatch.setattr("quark.onnx.search.lost_outputs.damage.PRODUCTS", 0)
    case = event_case(kind, 3, spoiled=True)
    assert quantized(case)[1].lost


def pairs(x: Array, y: Array) -> list[tuple[Array, Array]]:
    return [(one.astype(np.float32), other.astype(np.float32)) for one, other in zip(x, y, strict=True)]


def test_decisions_count_beside_the_sqnr() -> None:
    """Rare values of a logit that never comes: 14 dB; peaks above a floor that is 10 dB louder than they are."""
    x = np.full((50, 1), -8.0)
    x[7] = 4.0
    missed = verdict_of(OutputPart("y"), pairs(x, np.full_like(x, -8.0)))
    assert missed is not None and missed.sqnr is not None and missed.sqnr > 13
    assert missed.decisions == 0 and missed.lost()
    random = np.random.default_rng(0)
    maps = np.zeros((8, 64, 64))
    maps[:, 5, 9] = 0
    maps[3, 5, 9] = maps[6, 40, 2] = 1.0
    floor = random.uniform(0, 0.05, maps.shape)
    kept = verdict_of(OutputPart("y", bounded=True), pairs(maps, maps + floor))
    assert kept is not None and kept.sqnr is not None and kept.sqnr < LEAST
    assert kept.decisions == 1 and not kept.lost() and kept.lost(90)


@pytest.mark.parametrize(
    ("sqnr", "decisions", "lost"),
    [(10.0, None, False), (9.9, None, True), (9.9, 0.9, False), (9.9, 0.89, True), (30.0, 0.5, False),
     (30.0, 0.49, True), (None, 0.5, False), (None, 0.49, True)],
)  # fmt: skip
def test_a_task_is_lost_with_its_signal_or_half_of_its_decisions(
    sqnr: float | None, decisions: float | None, lost: bool
) -> None:
    assert Verdict(OutputPart("y"), sqnr, decisions).lost() is lost


def test_noise_is_no_event() -> None:
    """Values of no meaning that are lost are lost by their SQNR, and those that are kept keep their decisions."""
    random = np.random.default_rng(0)
    x = random.normal(size=(16, 1000))
    for noise, lost in ((0.1, False), (0.25, False), (0.6, True), (1.0, True)):
        found = verdict_of(OutputPart("y"), pairs(x, x + random.normal(0, noise, x.shape)))
        assert found is not None and found.lost() == lost
    level = 300 + x
    found = verdict_of(OutputPart("y"), pairs(level, np.round(level)))
    assert found is not None and found.decisions is None and not found.lost()


def test_silence_is_not_lost_and_says_so() -> None:
    x = np.full((8, 3), 1e-3)
    silent = verdict_of(OutputPart("y", bounded=True), pairs(x, 0 * x))
    assert silent is not None and silent.silent and silent.unclear and not silent.lost()
    noisy = verdict_of(OutputPart("y", bounded=True), pairs(x, x + 0.6))
    assert noisy is not None and noisy.lost()
    logits = verdict_of(OutputPart("y"), pairs(x, 0 * x))
    assert logits is not None and logits.lost()


def test_nodes_of_the_users_model_that_bring_the_outputs_back_are_named_after_they_were_tried() -> None:
    case = event_case("joined", 0, spoiled=True)

    def quantize(*exclude: str) -> Any:
        quantizer = ModelQuantizer(
            QConfig(QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()), exclude=[*exclude])
        )
        quantizer.settings = replace(quantizer.settings, least_sqnr=LEAST)
        quantizer.quantize_model(case.model, None, case.feeds)
        return quantizer.damage

    with pytest.raises(DamageError, match=r"at the output y\[:, :, 4:\], over") as caught:
        quantize()
    text = str(caught.value)
    names = text.split("Possible: exclude ")[1].split(" (tried: ")[0].split(", ")
    assert set(names) <= {node.name for node in case.model.graph.node}
    assert not quantize(*names).lost
