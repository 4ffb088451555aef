"""Quick steps end where the loss of a model is seldom felt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.core.metrics import Comparison, Metric
from quark.onnx import ModelQuantizer
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.graph.model_file import load
from quark.onnx.graph.output_parts import OutputPart
from quark.onnx.search.evaluator import LOST, SCORES_LOST, SPARE, PartScorer, ScoredModel

FEEDS = [{"x": np.eye(3, dtype=np.float32)[[i]]} for i in range(3)]


def scores(sign: float, last: str) -> onnx.ModelProto:
    """Of three classes."""
    weight = numpy_helper.from_array(np.diag([sign, 2, 3]).astype(np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["s"]), helper.make_node(last, ["s"], ["y"])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3]) for name in "xy"]
    graph = helper.make_graph(nodes, "scores", values[:1], values[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def scored(scorer: PartScorer, model: onnx.ModelProto) -> ScoredModel:
    made = ScoredModel(ModelQuantizer("A8W8").settings, load(model), 0.0, None, 0.0)
    return made.scored_by(scorer)


def is_plenty(scorer: PartScorer, score: float, made: ScoredModel) -> bool:
    """Whether a model would do if samples agreed on this score."""
    return scorer.is_plenty(replace(made, score=score, sums=()))


@pytest.mark.parametrize("last", ["Softmax", "Sigmoid"])
def test_scores_of_30_db_are_enough_where_all_decisions_are_kept(last: str) -> None:
    model = load(scores(1.0, last))
    scorer = PartScorer(
        model, Samples(FEEDS, model_inputs(model)), Metric("sqnr"), ModelQuantizer("A8W8").settings, by_scores=True
    )
    kept, other = (scored(scorer, scores(factor, last)) for factor in (1.1, -1.0))
    assert is_plenty(scorer, SCORES_LOST, kept) and not is_plenty(scorer, SCORES_LOST, other)
    assert is_plenty(scorer, SCORES_LOST + SPARE, other) and not is_plenty(scorer, SCORES_LOST - 1, kept)


def test_decisions_of_one_model_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(scores(1.0, "Sigmoid"))
    scorer = PartScorer(
        model, Samples(FEEDS, model_inputs(model)), Metric("sqnr"), ModelQuantizer("A8W8").settings, by_scores=True
    )
    kept, other = (scored(scorer, scores(factor, "Sigmoid")) for factor in (1.1, -1.0))
    runs, beside = list[ir.Model](), scorer.expected.beside
    monkeypatch.setattr(scorer.expected, "beside", lambda each, samples: runs.append(each) or beside(each, samples))
    found = [is_plenty(scorer, SCORES_LOST, each) for each in (kept, kept, other, kept)]
    assert found == [True, True, False, True] and runs == [kept.model, other.model, kept.model]


def test_of_other_outputs_the_noise_alone_tells() -> None:
    model = load(scores(1.0, "Identity"))
    scorer = PartScorer(
        model, Samples(FEEDS, model_inputs(model)), Metric("sqnr"), ModelQuantizer("A8W8").settings, by_scores=True
    )
    made = scored(scorer, scores(1.1, "Identity"))
    assert [is_plenty(scorer, score, made) for score in (LOST, LOST + SPARE)] == [False, True]


@pytest.mark.parametrize(
    ("last", "preset", "strict", "bound"),
    [
        ("Softmax", "INT8_CPU", False, SCORES_LOST),  # the largest of many scores decides
        ("Sigmoid", "INT8_CPU", False, LOST),
        ("Sigmoid", "INT8_CPU", True, SCORES_LOST),
        ("Sigmoid", "INT8_CPU_WEIGHTS", False, SCORES_LOST),  # wins no time
        ("Identity", "INT8_CPU", True, LOST),
    ],
)
def test_tasks_suffer_earlier_where_classes_decide_or_no_time_is_won(
    last: str, preset: str, strict: bool, bound: float
) -> None:
    model, settings = load(scores(2.0, last)), ModelQuantizer(preset).settings
    scorer = PartScorer(
        model, Samples(FEEDS, model_inputs(model)), Metric("sqnr"), settings, by_scores=True, strict=strict
    )
    part = scorer.score(model).part
    lost = [scorer.is_lost(ScoredModel(settings, model, score, part, 0.0)) for score in (bound - 0.1, bound)]
    assert lost == [True, False]


def test_few_samples_do_not_save_a_task_by_chance() -> None:
    """The samples differ, so that new ones may be below the bound; and of too many decisions little is left."""
    model, settings = load(scores(2.0, "Identity")), ModelQuantizer("INT8_CPU").settings
    scorer = PartScorer(model, Samples(FEEDS, model_inputs(model)), Metric("sqnr"), settings, by_scores=True)
    part = OutputPart("y")
    even, uneven = ([{part: Comparison(1, 400.0, 0, 0, n)} for n in each] for each in ((0.9, 1, 1.1), (0.1, 0.1, 2.8)))
    made = ScoredModel(settings, model, LOST + 1, part, 0.0)
    lost = [scorer.is_lost(replace(made, sums=sums)) for sums in (even, uneven)]
    assert lost == [False, True] and scorer.least(replace(made, sums=uneven)) < LOST
    assert scorer.least(replace(made, sums=uneven), new=True) < scorer.least(replace(made, sums=uneven))
    assert [scorer.is_lost(replace(made, decided=[{part: (kept, 100)}])) for kept in (96, 94)] == [False, True]
