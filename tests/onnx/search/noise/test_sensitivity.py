"""The noise of each tensor is what ONNX Runtime measures with this one quantized; the loudest nodes are found."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from quark.core.metrics import Metric
from quark.core.spec import LayerSpec, spec
from quark.errors import ConfigError, NotSupportedError
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.readers import TimeUpError
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.calibration.qparams import onnx_range
from quark.onnx.config.settings import Settings, SpecSettings
from quark.onnx.graph.model_file import infer_shapes, load, to_proto
from quark.onnx.search.evaluator import PartScorer
from quark.onnx.search.noise.choices import FloatNodes, Measured, known_noise, leave_in_float
from quark.onnx.search.noise.sensitivity import OutputNoise, sensitivity
from quark.onnx.search.noise.sources import NoiseRun, NoiseSource
from quark.onnx.search.settle import convert
from tests.models.onnx_zoo import Builder, cnn, images, mlp, outputs, vectors

INT8 = onnx_range(spec("int8"))
"""Codes from -127 to 127 of max |x| / 127, as ONNX has it."""
SETTINGS = Settings(SpecSettings(LayerSpec(weight=INT8, input=INT8), int32_bias=False))


def measured(proto: onnx.ModelProto, feeds: list[Any], settings: Settings = SETTINGS, **options: Any) -> OutputNoise:
    """The sensitivity of a model of the zoo."""
    model = load(proto)
    infer_shapes(model)
    return sensitivity(Prepared(model, Samples(feeds, model_inputs(model))), settings, **options)


def with_pair(proto: onnx.ModelProto, tensor: str, low: float, high: float) -> onnx.ModelProto:
    """The float model with a pair of symmetric int8 Q/DQ, of ONNX, in front of all readers of one tensor."""
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    scale = np.float32(max(-low, high) / 127)
    constants = {"pair_scale": scale, "pair_zero": np.zeros((), np.int8)}
    changed.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items())
    for node in changed.graph.node:
        for index, name in enumerate(node.input):
            if name == tensor:
                node.input[index] = "pair_out"
    pair = [
        helper.make_node("QuantizeLinear", [tensor, *constants], ["pair_codes"]),
        helper.make_node("DequantizeLinear", ["pair_codes", *constants], ["pair_out"]),
    ]
    position = next((i + 1 for i, node in enumerate(changed.graph.node) if tensor in node.output), 0)
    nodes = [*changed.graph.node[:position], *pair, *changed.graph.node[position:]]
    del changed.graph.node[:]
    changed.graph.node.extend(nodes)
    if any(output.name == tensor for output in changed.graph.output):
        changed.graph.node.append(helper.make_node("Identity", ["pair_out"], [f"{tensor}_pair"]))
        changed.graph.output[0].name = f"{tensor}_pair"
    return changed


def tensor_of(proto: onnx.ModelProto, name: str, feed: Any) -> Any:
    """The values of a tensor, or of the input."""
    if name in feed:
        return feed[name]
    tapped = onnx.ModelProto()
    tapped.CopyFrom(proto)
    del tapped.graph.output[:]
    tapped.graph.output.append(onnx.ValueInfoProto(name=name))
    return outputs(tapped, feed)[0]


def test_the_noise_of_an_activation_is_that_of_one_pair_in_onnx_runtime() -> None:
    proto, feed = mlp(), vectors(1)[0]
    expected = outputs(proto, feed)[0].astype(np.float64)
    found = {source.name: power for source, power in measured(proto, [feed]).powers.items() if not source.node}
    assert len(found) > 2
    for name, power in found.items():
        values = tensor_of(proto, name, feed)
        given = outputs(with_pair(proto, name, values.min(), values.max()), feed)[0]
        # The runtime divides where the reciprocal is multiplied with: a code may differ where it lies at a tie.
        ratio = np.sum((given - expected) ** 2) / np.sum(expected**2)
        assert power == pytest.approx(ratio, rel=1e-3), name


def test_the_noise_of_probabilities_is_that_of_their_scores_where_these_are_judged() -> None:
    """What is searched by is what is kept by: behind a sigmoid, the noise of what it reads."""
    scores, feed = mlp(), vectors(1)[0]
    model = onnx.ModelProto()
    model.CopyFrom(scores)
    model.graph.node.append(helper.make_node("Sigmoid", ["y"], ["p"], name="end"))
    model.graph.output[0].name = "p"
    ir_model = load(model)
    infer_shapes(ir_model)
    scorer = PartScorer(ir_model, Samples([feed], model_inputs(ir_model)), Metric("sqnr"), SETTINGS, by_scores=True)
    found = measured(model, [feed], measure=scorer.values).powers
    before = outputs(scores, feed)[0].astype(np.float64)
    names = [source.name for source in found if not source.node and source.name not in ("y", "p")]
    assert len(names) > 2
    for source, power in found.items():
        if source.name in names:
            values = tensor_of(scores, source.name, feed)
            after = outputs(with_pair(scores, source.name, values.min(), values.max()), feed)[0]
            ratio = np.sum((after - before) ** 2) / np.sum((before - before.mean()) ** 2)
            assert power == pytest.approx(ratio, rel=1e-2), source.name


def test_what_only_moves_values_adds_no_noise() -> None:
    """Transposed values lie on the grid already: they are noise together with what they come from, and as long."""
    b = Builder()
    made = b.node("MatMul", ["x", b.constant("first", b.random.normal(size=(8, 8)))], "made")
    moved = b.node("Transpose", [made], "moved", perm=[0, 2, 1])
    b.node("MatMul", [moved, b.constant("second", b.random.normal(size=(4, 4)))], "y")
    proto = b.model({"x": [1, 4, 8]}, {"y": [1, 8, 4]}, 17)
    feed = {"x": np.random.default_rng(0).normal(size=(1, 4, 8)).astype(np.float32)}
    found = {source.name: (source.holders, power) for source, power in measured(proto, [feed]).powers.items()}
    assert "moved" not in found
    holders, power = found["made"]
    assert holders == {node.name for node in proto.graph.node}
    seen = tensor_of(proto, "made", feed)
    pair = with_pair(proto, "made", seen.min(), seen.max())
    expected, given = (outputs(one, feed)[0].astype(np.float64) for one in (proto, pair))
    # Noise is held in codes of 8 bits: each is off by 1/508 of the largest at most, and by half as much in the mean.
    assert power == pytest.approx(np.square(given - expected).sum() / np.square(expected).sum(), rel=1 / 254)
    # The moved values, rounded to the same grid once more, are the same bits.
    again = tensor_of(pair, "moved", feed)
    scale = np.float32(max(-seen.min(), seen.max()) / 127)
    np.testing.assert_array_equal(np.rint(again / scale) * scale, again)


def test_the_noise_of_a_weight_is_that_of_its_rounded_values_in_onnx_runtime() -> None:
    proto, feed = mlp(), vectors(1)[0]
    expected = outputs(proto, feed)[0].astype(np.float64)
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    found = {source.name: power for source, power in measured(proto, [feed]).powers.items() if source.node}
    assert found
    for name, power in found.items():
        changed = mlp()
        array = numpy_helper.to_array(weights[name])
        scale = np.float32(abs(array).max() / 127)
        rounded = np.rint(array * (1 / scale)).astype(np.float32) * scale
        next(t for t in changed.graph.initializer if t.name == name).CopyFrom(numpy_helper.from_array(rounded, name))
        ratio = np.sum((outputs(changed, feed)[0] - expected) ** 2) / np.sum(expected**2)
        # Sums of products in another order: float32 leaves 1e-7 of the output, the noise is 1e-2 of it.
        assert power == pytest.approx(ratio, rel=1e-3), name


def test_halving_finds_the_loudest_tensor_in_fewer_runs() -> None:
    proto, feeds = mlp(), vectors(2)
    tensor = next(t for t in proto.graph.initializer if t.name == proto.graph.node[0].input[1])
    array = numpy_helper.to_array(tensor).copy()
    # One value so large that all others of the tensor are rounded to a few codes.
    array.flat[0] = 40 * abs(array).max()
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    every = measured(proto, feeds)
    noisiest = max(every.powers, key=lambda source: every.powers[source])
    halved = measured(proto, feeds, runs=len(every.powers) - 2)
    assert max(halved.powers, key=lambda source: halved.powers[source]) == noisiest
    assert halved.powers[noisiest] == pytest.approx(every.powers[noisiest])
    assert noisiest.holders <= set(every.worst_nodes(len(noisiest.holders) + 1))


def test_a_tensor_is_in_float_once_all_that_hold_it_are() -> None:
    powers = {
        NoiseSource("between", "", frozenset("ab")): 10.0,
        NoiseSource("w", "c", frozenset("c")): 4.0,
        NoiseSource("v", "a", frozenset("a")): 1.0,
    }
    found = OutputNoise(powers)
    assert found.of_nodes() == {"a": 6.0, "b": 5.0, "c": 4.0}
    assert found.total == 15
    assert found.worst_nodes(1) == ["c"]
    assert found.worst_nodes(2) == ["a", "b"]
    assert found.worst_nodes(9) == ["a", "b", "c"]
    # Two nodes that take 6 away together take less for each than one that takes 4.
    assert OutputNoise({**powers, NoiseSource("between", "", frozenset("ab")): 6.0}).worst_nodes(2) == ["c", "a"]
    # What is in float already counts as such, and is not named again.
    assert found.worst_nodes(1, before=["a"]) == ["b"]
    assert found.worst_nodes(2, before=["a"]) == ["b", "c"]


def test_nodes_in_float_are_counted_by_their_cost() -> None:
    """One that gains most, and takes most of the time, is worth less than two that take none of it."""
    powers = {NoiseSource(name, name, frozenset(name)): power for name, power in (("a", 9.0), ("b", 3.0), ("c", 2.0))}
    found, costs = OutputNoise(powers), {"a": 2.6, "b": 0.3, "c": 0.1}
    assert found.worst_nodes(1) == ["a"]
    assert found.worst_nodes(1, costs=costs) == ["c", "b"]
    assert found.worst_nodes(2.6, ["c", "b"], costs) == ["a"]
    assert found.worst_nodes(2.5, ["c", "b"], costs) == []


def test_what_was_measured_is_known_where_nodes_in_float_came_by_their_names() -> None:
    noise = OutputNoise({})
    for added, known in ((("a", "b"), (noise, ["a", "b"])), (("a", re.compile("b")), None)):
        settings = replace(SETTINGS, specs=replace(SETTINGS.specs, exclude=(*SETTINGS.specs.exclude, *added)))
        assert known_noise(settings, [(SETTINGS, noise)]) == known
    other = replace(SETTINGS, calibration=replace(SETTINGS.calibration, percentile=90.0))
    assert known_noise(other, [(SETTINGS, noise)]) is None


@pytest.mark.slow
def test_more_nodes_in_float_are_chosen_by_what_was_measured_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step or in two: the noise of a tensor is that of it alone. Other ranges have other noises."""
    model, calls, plain = load(cnn()), list[Settings](), sensitivity
    infer_shapes(model)
    data = Samples(images(), model_inputs(model))

    def counted(model: ir.Model, settings: Settings, *given: Any, **options: Any) -> OutputNoise:
        calls.append(settings)
        return plain(model, settings, *given, **options)

    monkeypatch.setattr("quark.onnx.search.noise.choices.sensitivity", counted)
    measured: Measured = []
    one = FloatNodes(share=0.01)
    settings = SETTINGS
    for _ in range(3):
        settings = leave_in_float(Prepared(model, data), one, settings, measured=measured)
    assert len(calls) == 1 and len(set(settings.specs.exclude)) == 3
    noise = measured[0][1]
    assert list(settings.specs.exclude) == noise.worst_nodes(3)
    other = replace(settings, calibration=replace(settings.calibration, percentile=90.0))
    leave_in_float(Prepared(model, data), one, other, measured=measured)
    assert calls[1:] == [other]


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="runs=0, count=2"):
        measured(mlp(), vectors(1), runs=0)
    dynamic = Settings(SpecSettings(LayerSpec(weight=spec("int8"), input=spec("uint8", dynamic=True, symmetric=False))))
    with pytest.raises(NotSupportedError, match="dynamic quantization is not measured"):
        measured(mlp(), vectors(1), dynamic)


def test_no_run_begins_after_the_time_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(cnn())
    data, runs = Samples(images(), model_inputs(model)), list[int]()
    plain = NoiseRun.outputs

    def counted(self: NoiseRun, *given: Any) -> Any:
        runs.append(len(runs))
        data.until = -math.inf if len(runs) == 3 else math.inf
        return plain(self, *given)

    monkeypatch.setattr(NoiseRun, "outputs", counted)
    with pytest.raises(TimeUpError):
        sensitivity(Prepared(model, data), SETTINGS)
    assert len(runs) == 3


def test_the_worst_node_in_float_loses_less_than_any_other() -> None:
    """Of a model with one bad weight, in ONNX Runtime."""
    proto, feeds = mlp(), vectors(2)
    tensor = next(t for t in proto.graph.initializer if t.name == proto.graph.node[0].input[1])
    array = numpy_helper.to_array(tensor).copy()
    array.flat[0] = 40 * abs(array).max()
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    model = load(proto)
    infer_shapes(model)
    data = Samples(feeds, model_inputs(model))
    settings = leave_in_float(Prepared(model, data), FloatNodes(share=0.01), SETTINGS)
    assert len(settings.specs.exclude) == 1

    def error(exclude: tuple[Any, ...]) -> float:
        specs = replace(SETTINGS.specs, exclude=exclude)
        quantized = to_proto(convert(Prepared(model.clone(), data), replace(SETTINGS, specs=specs)))
        return sum(float(np.square(outputs(quantized, feed)[0] - outputs(proto, feed)[0]).sum()) for feed in feeds)

    others = [node.name for node in model.graph if node.name not in settings.specs.exclude]
    assert others
    assert all(error(settings.specs.exclude) < error((name,)) for name in others)
