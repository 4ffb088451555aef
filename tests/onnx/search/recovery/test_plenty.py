"""Quick steps end where the loss of a model is seldom felt."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.core.metrics import Metric
from quark.onnx import ModelQuantizer
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.graph.model_file import load
from quark.onnx.search.evaluator import LOST, SCORES_LOST, SPARE, PartScorer, ScoredModel

FEEDS = [{"x": np.eye(3, dtype=np.float32)[[i]]} for i in range(3)]


def scores(sign: float, last: str) -> onnx.ModelProto:
    """Of three classes."""
    weight = numpy_helper.from_array(np.diag([sign, 2, 3]).astype(np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["s"]), helper.make_node(last, ["s"], ["y"])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3]) for name in "xy"]
    graph = helper.make_graph(nodes, "scores", values[:1], values[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("last", ["Softmax", "Sigmoid"])
def test_scores_of_30_db_are_enough_where_all_decisions_are_kept(last: str) -> None:
    model = load(scores(1.0, last))
    scorer = PartScorer(
        model, Samples(FEEDS, model_inputs(model)), Metric("sqnr"), ModelQuantizer("A8W8").settings, by_scores=True
    )
    _, part, _ = scorer.score(model)
    kept, other = load(scores(1.1, last)), load(scores(-1.0, last))
    assert scorer.is_plenty(SCORES_LOST, part, kept) and not scorer.is_plenty(SCORES_LOST, part, other)
    assert scorer.is_plenty(SCORES_LOST + SPARE, part, other) and not scorer.is_plenty(SCORES_LOST - 1, part, kept)


def test_decisions_of_one_model_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(scores(1.0, "Softmax"))
    scorer = PartScorer(
        model, Samples(FEEDS, model_inputs(model)), Metric("sqnr"), ModelQuantizer("A8W8").settings, by_scores=True
    )
    _, part, _ = scorer.score(model)
    runs, beside = list[ir.Model](), scorer.expected.beside
    monkeypatch.setattr(scorer.expected, "beside", lambda each: runs.append(each) or beside(each))
    kept, other = load(scores(1.1, "Softmax")), load(scores(-1.0, "Softmax"))
    assert [scorer.is_plenty(SCORES_LOST, part, each) for each in (kept, kept, other, kept)] == [
        True,
        True,
        False,
        True,
    ]
    assert runs == [kept, other, kept]


def test_of_other_outputs_the_noise_alone_tells() -> None:
    model = load(scores(1.0, "Identity"))
    scorer = PartScorer(
        model, Samples(FEEDS, model_inputs(model)), Metric("sqnr"), ModelQuantizer("A8W8").settings, by_scores=True
    )
    _, part, _ = scorer.score(model)
    assert [scorer.is_plenty(score, part, model) for score in (LOST, LOST + SPARE)] == [False, True]


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
