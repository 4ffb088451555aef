"""The model that trials of mixed precision share, against the quantized models that it stands for, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from quark.onnx import Int4Spec, Int8Spec, Int16Spec, QConfig, QLayerConfig, UInt8Spec, UInt16Spec
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.settings import Settings
from quark.onnx.decide import decide, write
from quark.onnx.flow.prepare import prepare
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.search.evaluator import mean_by_metric
from quark.onnx.search.mixed_precision import switched as switched_module
from quark.onnx.search.mixed_precision.switched import SwitchedOutputs
from tests.models.onnx_zoo import cnn, images
from tests.onnx.search.mixed_precision.test_auto_mixprecision import batches, chain

INT8 = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
INT16 = QLayerConfig(input_tensors=Int16Spec(), weight=Int16Spec())
UINT8 = QLayerConfig(input_tensors=UInt8Spec(symmetric=False), weight=Int8Spec())
UINT16 = QLayerConfig(input_tensors=UInt16Spec(symmetric=False), weight=Int16Spec())
INT4 = QLayerConfig(input_tensors=UInt8Spec(symmetric=False), weight=Int4Spec())


def settings_of(base: QLayerConfig, own: QLayerConfig, layers: Sequence[str], **options: Any) -> Settings:
    return lower(QConfig(base, specific_layer_config={own: list(layers)} if layers else {}, **options))


def shared(model: onnx.ModelProto, data: Any, wanted: Sequence[Settings]) -> tuple[SwitchedOutputs, list[Settings]]:
    """Outputs of a model, shared under the first and the last of these settings; all of them, prepared."""
    graph = load(model)
    prepared = [prepare(graph, one) for one in wanted]
    samples = Samples(data, model_inputs(model))
    trials = SwitchedOutputs(Prepared(graph, samples, statistics={}), graph.graph.outputs[0].name or "")
    trials.share([prepared[0], prepared[-1]])
    return trials, prepared


def written(trials: SwitchedOutputs, settings: Settings) -> list[Any]:
    """The output of the quantized model for each sample, each node computed as it stands."""
    model, data = trials.prepared.model.clone(), trials.prepared.data
    write(decide(Prepared(model, data), settings))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(to_proto(model).SerializeToString(), options)
    return [session.run([trials.output], feed)[0] for feed in data]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "own"), [(INT8, INT16), (INT16, INT8), (UINT8, UINT16), (UINT16, INT4), (INT8, UINT8)]
)
@pytest.mark.parametrize("name", ["chain", "cnn"])
def test_a_trial_gives_what_the_quantized_model_gives(
    name: str, base: QLayerConfig, own: QLayerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of chains of MatMul and Relu, and of convolutions with biases, pools, joins and two readers of a tensor.

    All layers, none, and each: no session is opened for any of them.
    """
    model, data = (chain(), batches()) if name == "chain" else (cnn(21), images(2))
    layers = [node.name for node in model.graph.node if node.op_type in ("MatMul", "Conv", "Gemm")]
    choices = [[], *([layer] for layer in layers), layers[::2], layers]
    trials, settings = shared(model, data, [settings_of(base, own, choice) for choice in choices])

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a trial opens no session")

    expected = [written(trials, one) for one in settings]
    monkeypatch.setattr(switched_module, "open_session", refuse)
    for one, outputs in zip(settings, expected, strict=True):
        found = [array for (array,) in trials(one, len(outputs)) or ()]
        for x, y in zip(outputs, found, strict=True):
            np.testing.assert_array_equal(x, y)
    assert any(not np.array_equal(expected[0][0], other[0]) for other in expected[1:])


@pytest.mark.slow
def test_a_trial_begins_where_it_first_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What crossed under the first decision is kept: the last layer alone runs the last part alone."""
    model = chain()
    choices: list[list[str]] = [[], ["four"], ["one"], ["one", "two", "three", "four"]]
    trials, settings = shared(model, batches(), [settings_of(INT16, INT8, choice) for choice in choices])
    assert trials.switched is not None
    parts, ran = trials.switched._parts, list[int]()
    assert len(parts) > 2

    class Counting:
        def __init__(self, index: int) -> None:
            self.index, self.session = index, parts[index].session

        def run_with_ort_values(self, names: Any, feed: Any) -> Any:
            ran.append(self.index)
            return self.session.run_with_ort_values(names, feed)

    trials.switched._parts = [replace(part, session=Counting(i)) for i, part in enumerate(parts)]  # type: ignore[arg-type]
    evaluator = trials.evaluator(mean_by_metric("l2"))
    for one, least in ((settings[0], 0), (settings[1], len(parts) - 2), (settings[2], 0)):
        ran.clear()
        evaluator.score(one)
        assert min(ran) >= least and ran.count(len(parts) - 1) == 3
    ran.clear()
    evaluator.score(settings[0])
    assert ran == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"DedicatedQDQPair": True}, {"UseQDQContribOps": True}, {"Int16Bias": True}])
def test_other_forms_of_the_same_numbers(options: dict[str, Any]) -> None:
    wanted = [settings_of(UINT8, UINT16, choice, **options) for choice in ([], ["last_conv_node"])]
    trials, settings = shared(cnn(21), images(2), wanted)
    assert trials.switched is not None
    for one in settings:
        for x, (y,) in zip(written(trials, one), trials(one, 2) or (), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_where_more_than_numbers_differ_a_trial_quantizes_a_model() -> None:
    """A layer in float has fewer scales; two pairs stand where precisions meet."""
    wanted = [lower(QConfig(INT8)), lower(QConfig(INT8, exclude=["two"])), settings_of(INT8, INT16, ["one"])]
    trials, settings = shared(chain(), batches(), wanted)
    assert trials.switched is not None
    before = to_proto(trials.prepared.model)
    for one in settings:
        outputs = trials(one, 3)
        assert (outputs is None) is (one is settings[1])
        for x, (y,) in zip(written(trials, one), outputs or (), strict=outputs is not None):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * float(np.abs(x).max()))
    assert to_proto(trials.prepared.model) == before
    apart = SwitchedOutputs(replace(trials.prepared, statistics={}), trials.output)
    apart.share([replace(one, qdq=replace(one.qdq, dual_pairs=True)) for one in settings])
    scores = [each.evaluator(mean_by_metric("l2")).score(settings[0]) for each in (apart, trials)]
    assert apart.switched is None and scores[0] == pytest.approx(scores[1], rel=1e-3)
