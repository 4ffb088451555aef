"""A refusal says what outputs are lost by, what was tried is what is promised, and it comes to an end."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from quark.errors import DamageError
from quark.onnx import BiasCorrectionConfig, Int8Spec, ModelQuantizer, QConfig, QLayerConfig
from quark.onnx.config.settings import Settings
from quark.onnx.graph.model_file import load, read
from quark.onnx.search.history import TimeBudget
from quark.onnx.search.lost_outputs import advice as module
from quark.onnx.search.lost_outputs.causes import channel_ratios, tensor_causes, uneven_channels
from quark.onnx.search.lost_outputs.dead_channels import dead_channels
from quark.onnx.search.lost_outputs.trials import Trials
from quark.onnx.search.settle import quantize_as_decided
from tests.models.onnx_zoo import Builder, vectors

FOREVER = TimeBudget(lambda: 0.0)


def uneven(ratio: float = 300.0) -> onnx.ModelProto:
    """Half of the channels of a layer are small, and the next layer makes up for it, as nothing equalizes."""
    b = Builder()
    scale = np.where(np.arange(32) % 2, 1.0, 1 / ratio)
    hidden = b.node("MatMul", ["x", b.constant("w", b.random.normal(0, 0.2, (32, 32)) * scale)], "hidden")
    b.node("MatMul", [b.node("Mul", [hidden, b.constant("back", 1 / scale)], "even"), b.constant("v", np.eye(32))], "y")
    return b.model({"x": ["n", 32]}, {"y": ["n", 32]})


def spiky() -> onnx.ModelProto:
    """Half of the output channels read one value, the others a mean of thousands: as loud, of weights as small."""
    b = Builder()
    weight = b.random.uniform(-1, 1, (4096, 16)) / 48
    weight[:, ::2] = np.eye(4096, 8)
    b.node("MatMul", ["x", b.constant("w", weight)], "y")
    return b.model({"x": ["n", 4096]}, {"y": ["n", 16]})


def wide_vectors() -> list[dict[str, Any]]:
    return [{"x": np.random.default_rng(seed).normal(size=(1, 4096)).astype(np.float32)} for seed in range(8)]


def with_dead_channels() -> onnx.ModelProto:
    """A quarter of the channels have weights near zero, a quarter small ones behind a Relu that never fires."""
    b, part = Builder(), np.arange(32) % 4
    weight = b.random.normal(0, 0.2, (32, 32)) * np.choose(part, [1e-9, 1e-2, 1.0, 1.0])
    hidden = b.node("MatMul", ["x", b.constant("w", weight)], "hidden")
    shifted = b.node("Add", [hidden, b.constant("bias", np.choose(part, [1.0, -9.0, 0.1, 0.1]))], "shifted")
    b.node("MatMul", [b.node("Relu", [shifted], "active"), b.constant("v", b.random.normal(size=(32, 8)))], "y")
    return b.model({"x": ["n", 32]}, {"y": ["n", 8]})


def quantizer(least: float = 40.0, **more: Any) -> ModelQuantizer:
    made = ModelQuantizer(QConfig(QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()), **more))
    made.settings = replace(made.settings, least_sqnr=least)
    return made


def test_channels_under_one_scale_are_named_with_their_ratio() -> None:
    made = ModelQuantizer(QConfig(QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())))
    quantized = made.quantize_model(uneven(40.0), None, vectors(4))
    assert quantized is not None
    ratios = dict(channel_ratios(read(quantized)))
    assert 20 < ratios["hidden_node"] < 80 and set(ratios) == {"hidden_node", "y_node"}
    assert "in 1 of 2 weights: hidden_node (" in str(uneven_channels(load(uneven(40.0)), quantized, vectors(1)))


def test_dead_channels_are_no_cause() -> None:
    """They have no codes either: without samples nobody can tell them from small ones."""
    proto, feeds = with_dead_channels(), vectors(8)
    made = ModelQuantizer(QConfig(QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())))
    quantized = made.quantize_model(proto, None, feeds)
    assert quantized is not None
    assert uneven_channels(load(proto), quantized, feeds) is None
    assert "hidden_node (" in str(uneven_channels(load(proto), quantized, []))
    dead = dead_channels(load(proto), ["hidden_node"], feeds)["hidden_node"]
    assert dead.tolist() == [channel % 4 < 2 for channel in range(32)]


def test_what_a_softmax_gives_has_no_outliers() -> None:
    b = Builder()
    b.node("Softmax", [b.node("MatMul", ["x", b.constant("w", 40 * np.eye(2048))], "loud")], "y", axis=-1)
    proto = b.model({"x": ["n", 2048]}, {"y": ["n", 2048]})
    assert tensor_causes(load(proto), ["y"], [{"x": np.eye(1, 2048, dtype=np.float32)}], FOREVER) == []


def test_outliers_masks_and_spectra_are_told_apart() -> None:
    b = Builder()
    for name, value in (("outlier", 100.0), ("mask", -1e9)):
        spike = np.zeros((1, 2048))
        spike[0, 0] = value
        b.node("Add", ["x", b.constant(f"{name}_c", spike)], name)
    b.node("Exp", [b.node("Mul", ["x", b.constant("four", np.array(4.0))], "loud")], "power")
    b.node("Log", ["power"], "y")
    ends = {name: ["n", 2048] for name in ("outlier", "mask", "y")}
    proto = b.model({"x": ["n", 2048]}, ends)
    feed = {"x": b.random.normal(size=(1, 2048)).astype(np.float32)}
    found = tensor_causes(load(proto), ["outlier", "mask"], [feed], FOREVER)
    assert [("an outlier" in each, "a mask" in each, "The logarithm y_node" in each) for each in found] == [
        (True, False, False), (False, True, False), (False, False, True),
    ]  # fmt: skip
    assert tensor_causes(load(proto), ["outlier"], [feed], TimeBudget(lambda: 1.0, 0.0)) == []


def test_what_is_tried_is_the_quantization_that_was_refused() -> None:
    """With its algorithms; a quick trial leaves them out."""
    made = quantizer(algo_config=[BiasCorrectionConfig()])
    trials = Trials(load(uneven()), made.settings, vectors(8), FOREVER)
    names = frozenset({"hidden_node"})
    quick, whole = trials.without(names), trials.without(names, whole=True)
    assert quick is not None and whole is not None and quick.whole is False and whole.whole is True
    followed = quantizer(algo_config=[BiasCorrectionConfig()], exclude=["hidden_node"])
    followed.settings = replace(followed.settings, least_sqnr=None)
    followed.quantize_model(uneven(), None, vectors(8))
    assert followed.damage is not None
    assert whole.left.sqnr == pytest.approx(followed.damage.sqnr, abs=0.01) and "corrections" in str(quick)


def test_another_configuration_is_tried_without_what_the_refused_one_does_to_the_graph() -> None:
    """XINT8 makes a HardSigmoid of a Sigmoid, which BF16 keeps."""
    b = Builder()
    hidden = b.node("Sigmoid", [b.node("MatMul", ["x", b.constant("w", np.eye(32) * 3)], "hidden")], "gate")
    b.node("MatMul", [hidden, b.constant("v", b.random.normal(size=(32, 32)))], "y")
    proto = b.model({"x": ["n", 32]}, {"y": ["n", 32]})
    found = Trials(load(proto), ModelQuantizer("XINT8").settings, vectors(8), FOREVER).configured("BF16")
    followed = ModelQuantizer("BF16")
    followed.quantize_model(proto, None, vectors(8))
    assert found is not None and followed.damage is not None
    assert found.left.sqnr == pytest.approx(followed.damage.sqnr, abs=0.01) and found.left.sqnr > 40


@pytest.mark.parametrize("kept", [True, False])
def test_another_configuration_is_equalized_where_the_refused_one_was(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A detector that lost 11 dB by it in A8W8, as in XINT8, was promised 10.3 dB, and A8W8 gave 17.7."""
    b = Builder()
    hidden = b.node("Relu", [b.node("MatMul", ["x", b.constant("w", b.random.normal(size=(32, 32)))], "hidden")], "r")
    b.node("MatMul", [hidden, b.constant("v", b.random.normal(size=(32, 32)))], "y")
    spread = np.logspace(-1.5, 1.5, 32) if kept else np.ones(32)
    proto = b.model({"x": ["n", 32]}, {"y": ["n", 32]})
    for name, scale in (("w", spread[None]), ("v", 1 / spread[:, None])):
        (tensor,) = (each for each in proto.graph.initializer if each.name == name)
        array = onnx.numpy_helper.to_array(tensor) * scale
        tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    asked, tried = ModelQuantizer("XINT8").settings, list[bool]()
    _, decided = quantize_as_decided(load(proto), asked, vectors(8))
    monkeypatch.setattr(Trials, "tried", lambda self, *_, **__: tried.append(self.settings.equalization is not None))
    trials = Trials(load(proto), decided, vectors(1), FOREVER)
    trials.with_float_scales()
    trials.with_bfloat16()
    assert (decided.equalization is not None, tried) == (kept, [kept, False])


def spread_inputs() -> list[dict[str, Any]]:
    """Values of which one in a thousand is 3000 times as large as the others."""
    random = np.random.default_rng(0)
    feeds = [{"x": random.normal(size=(256, 32)).astype(np.float32)} for _ in range(16)]
    for feed in feeds:
        feed["x"][::32, 0] = 3000.0
    return feeds


def with_outliers() -> onnx.ModelProto:
    """The outlier is read by one of the outputs alone, as large; 8 bits leave nothing of the others."""
    b = Builder()
    weight = np.diag([1e-3, *np.ones(31)])
    hidden = b.node("MatMul", ["x", b.constant("w", weight)], "hidden")
    b.node("MatMul", [b.node("Tanh", [hidden], "bounded"), b.constant("v", np.eye(32))], "y")
    return b.model({"x": ["n", 32]}, {"y": ["n", 32]})


def test_activations_of_16_bits_are_named_where_they_keep_the_outputs() -> None:
    """With what they leave, at least; their layers are quantized as those of --config A16W8."""
    proto, feeds = with_outliers(), spread_inputs()
    with pytest.raises(DamageError) as error:
        quantizer(least=10.0).quantize_model(proto, None, feeds)
    promised = re.search(r"A16W8 with --config A16W8: .*?tried: SQNR (\S+) dB", str(error.value))
    followed = ModelQuantizer("A16W8")
    followed.quantize_model(proto, None, feeds)
    assert promised is not None and followed.damage is not None
    assert float(promised[1]) == pytest.approx(followed.damage.sqnr, abs=1.0) and followed.damage.sqnr > 20


def test_other_integers_are_tried_where_they_are_others_and_the_target_runs_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(Trials, "configured", lambda _, name, budget=None: tried.append(name))
    for settings in (
        ModelQuantizer("XINT8").settings, ModelQuantizer("A16W8").settings, ModelQuantizer("BF16").settings,
        ModelQuantizer("INT8_CPU").settings, ModelQuantizer("INT8_OPENVINO").settings,
    ):  # fmt: skip
        tried.append("-")
        trials = Trials(load(uneven()), settings, vectors(1), FOREVER)
        trials.with_float_scales()
        trials.with_int16()
    assert tried == ["-", "A8W8", "A16W8", "-", "-", "-", "-"]


def test_the_default_is_named_where_other_types_lose_the_outputs_too() -> None:
    """BF16 has steps of 4 at 1000; what is quantized for MatMuls alone keeps the sum. With A16W8 there is no need."""
    b = Builder()
    hidden = b.node("MatMul", ["x", b.constant("w", b.random.normal(size=(32, 32)) / 8)], "hidden")
    shift = b.constant("shift", np.array(1000.0))
    b.node("Sub", [b.node("Add", [hidden, shift], "shifted"), shift], "y")
    proto = b.model({"x": ["n", 32]}, {"y": ["n", 32]})
    errors = []
    for config in ("BF16", "XINT8"):
        refused = ModelQuantizer(config)
        refused.settings = replace(refused.settings, least_sqnr=10.0)
        with pytest.raises(DamageError) as error:
            refused.quantize_model(proto, None, vectors(8))
        errors.append(str(error.value))
    promised = re.search(r"INT8_CPU_DYNAMIC with --config INT8_CPU_DYNAMIC: .*?tried: SQNR (\S+) dB", errors[0])
    followed = ModelQuantizer("INT8_CPU_DYNAMIC")
    followed.quantize_model(proto, None, vectors(8))
    assert promised is not None and followed.damage is not None
    assert float(promised[1]) == pytest.approx(followed.damage.sqnr, abs=0.1) and followed.damage.sqnr > 30
    assert "with --config A16W8" in errors[1] and "INT8_CPU_DYNAMIC" not in errors[1]


@pytest.mark.parametrize(("missing", "named"), [(1.0, True), (5.0, False)])
def test_adaround_is_named_with_its_time_where_its_gain_may_be_enough(missing: float, named: bool) -> None:
    made = ModelQuantizer("A8W8")
    made.settings = replace(made.settings, least_sqnr=None)
    made.quantize_model(spiky(), None, wide_vectors())
    assert made.damage is not None
    made.settings = replace(made.settings, least_sqnr=made.damage.sqnr + missing)
    with pytest.raises(DamageError) as error:
        made.quantize_model(spiky(), None, wide_vectors())
    words = r"AdaRound with --algorithm adaround:num_iterations=100: .*not tried: it takes up to \d+ s more"
    assert (re.search(words, str(error.value)) is not None) is named


def test_adaround_is_for_integers_that_nothing_has_learned() -> None:
    may = {
        name: Trials(load(uneven()), ModelQuantizer(name).settings, vectors(1), FOREVER).may_learn
        for name in ("XINT8", "A8W8", "A8W8_ADAROUND", "BF16", "INT8_CPU_DYNAMIC")
    }
    assert [name for name, each in may.items() if each] == ["XINT8", "A8W8"]


def test_a_look_at_nodes_leaves_time_for_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a detector it took all of it, and a refusal named nothing that helps."""
    steps: list[str] = []

    def look(*given: Any) -> list[Any]:
        steps.append("nodes" if given[3]() < 0.3 * module.LEAST_SECONDS else "nodes, with all the time")
        return []

    monkeypatch.setattr(module, "damaged_layers", look)
    monkeypatch.setattr(Trials, "configured", lambda _, name, budget=None: steps.append(name))
    with pytest.raises(DamageError):
        quantizer().quantize_model(uneven(), None, vectors(8))
    assert steps == ["BF16", "A16W8", "INT8_CPU_DYNAMIC", "nodes"]


def test_a_refusal_names_the_cause_and_the_scales_that_help(caplog: pytest.LogCaptureFixture) -> None:
    feeds = wide_vectors()
    with caplog.at_level(logging.INFO, "quark"), pytest.raises(DamageError) as error:
        quantizer(least=28.0).quantize_model(spiky(), None, feeds)
    assert "One scale serves channels of very different ranges" in str(error.value)
    assert "weights with a scale for each channel" in str(error.value) and "(tried: SQNR" in str(error.value)
    assert "It is made, and --allow-damage writes it as it is" in caplog.text and "for advice left" in caplog.text


def test_an_advice_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """At half of the time of the quantization, or a few seconds: here at once."""
    monkeypatch.setattr(module, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(module, "SHARE", 0.0)
    settings: list[Settings] = []
    monkeypatch.setattr("quark.onnx.search.lost_outputs.trials.damage", lambda *given: settings.append(given[3]))
    with pytest.raises(DamageError, match="Most is lost at .* Possible: another configuration"):
        quantizer().quantize_model(uneven(), None, vectors(8))
    assert not settings
