"""Recovery keeps what gains on held-out samples, says what it did, and ends in time."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.core.metrics import UNITS, Metric
from quark.core.spec import LayerSpec, ScaleType, spec
from quark.errors import CalibrationError, ConfigError, NothingQualifiesError, NotSupportedError
from quark.onnx import (
    AdaQuantConfig,
    AdaRoundConfig,
    BiasCorrectionConfig,
    CalibMethod,
    CLEConfig,
    GPTQConfig,
    Int8Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    UInt8Spec,
)
from quark.onnx.algorithms import AFTER, BEFORE
from quark.onnx.algorithms.rounding.worst_layers import WorstLayers
from quark.onnx.calibration import calibrate as calibrate_module
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.calibration.qparams import onnx_range
from quark.onnx.config.settings import CalibrationSettings, QDQSettings, Settings, SpecSettings
from quark.onnx.flow.prepare import prepare
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.search.change import Goal, Situation
from quark.onnx.search.history import duration
from quark.onnx.search.noise.choices import FloatNodes, TensorRanges
from quark.onnx.search.recovery import search as search_module
from quark.onnx.search.recovery.search import Recovery, reaches, recover
from quark.onnx.search.recovery.steps import (
    STEPS,
    Step,
    floating,
    raise_all_bits,
    raise_bits,
    ranges,
    solve_few_bits,
    tensor_ranges,
    tuning,
    with_plain_ranges,
)
from quark.onnx.search.settle import convert, quantize
from tests.models.onnx_zoo import Builder, Reader, cnn, images, mlp, outputs, vectors
from tests.onnx.algorithms.test_cle import CHAIN, badly_scaled, chain

CONFIG = QConfig(QLayerConfig(input_tensors=UInt8Spec(calibration_method=CalibMethod.MinMax), weight=Int8Spec()))
RAISE = Step("bits", raise_bits)
S8 = Settings(
    SpecSettings(LayerSpec(weight=spec("int8"), input=spec("uint8", symmetric=False))),
    calibration=CalibrationSettings(percentile=60.0),
)
HELD_OUT = (3, 7)
FITTED = (0, 1, 2, 4, 5, 6)


def found(model: onnx.ModelProto, feeds: list[Any], *steps: Step, settings: Settings = S8, **options: Any) -> Recovery:
    options = {"metric": Metric("sqnr"), "steps": steps, **options}
    result, best = recover(load(model), settings, feeds, **options)
    return replace(result, model=to_proto(best))


def with_layer(settings: Settings, layer: LayerSpec) -> Settings:
    return replace(settings, specs=replace(settings.specs, layer=layer))


def weights_of(dtype: str, **more: Any) -> Step:
    """A step that is sure to gain."""
    weight = onnx_range(spec(dtype, **more))
    return Step(dtype, lambda settings, _: with_layer(settings, replace(settings.specs.layer, weight=weight)))


WORSE = replace(weights_of("int8", observer="percentile"), name="worse")
"""Weights cut as S8 says below."""


def measured(metric: str, reference: Any, model: Any, feeds: list[Any]) -> float:
    """The metric of the worst output over all samples, from its definition."""
    pairs = zip(*(zip(outputs(reference, feed), outputs(model, feed), strict=True) for feed in feeds), strict=True)
    values = []
    for pair in pairs:
        x, y = (
            np.concatenate([np.ravel(part).astype(np.float64) for part in side]) for side in zip(*pair, strict=True)
        )
        noise = np.sum((x - y) ** 2)
        values.append(
            {
                "sqnr": 10 * np.log10(np.sum(x**2) / noise),
                "psnr": 10 * np.log10(np.max(np.abs(x)) ** 2 * x.size / noise),
                "cosine": x @ y / np.linalg.norm(x) / np.linalg.norm(y),
                "l2": np.sqrt(noise),
            }[metric]
        )
    return float(max(values) if metric == "l2" else min(values))


def two_heads() -> onnx.ModelProto:
    """Two outputs, one of which suffers far more."""
    b = Builder()
    scale = np.logspace(-1, 1, 16)
    b.node("MatMul", ["x", b.constant("fine_w", b.random.normal(0, 0.2, (32, 16)))], "fine")
    b.node("MatMul", ["x", b.constant("rough_w", b.random.normal(0, 0.2, (32, 16)) * scale)], "hidden")
    b.node("Mul", ["hidden", b.constant("back", 1 / scale)], "rough")
    return b.model({"x": ["n", 32]}, {"fine": ["n", 16], "rough": ["n", 16]})


@pytest.mark.parametrize("metric", UNITS)
def test_the_score_is_the_metric_of_the_worst_output_on_held_out_samples(metric: str) -> None:
    feeds = vectors(8)
    result = found(two_heads(), feeds, metric=Metric(metric))
    assert (result.fitted, result.held_out) == (6, 2)
    expected = measured(metric, two_heads(), result.model, [feeds[i] for i in HELD_OUT])
    assert result.plain == result.score == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("steps", ((), STEPS))
def test_the_result_is_what_its_settings_make_of_the_fitted_samples(steps: tuple[Step, ...]) -> None:
    feeds = images(8)
    result = found(cnn(), feeds, *[step for step in steps if not step.name.startswith("Ada")])
    plain = quantize(load(cnn()), S8, Reader(feeds[i] for i in FITTED))
    again = load(cnn())
    prepare(again, S8)
    convert(Prepared(again, Reader(feeds[i] for i in FITTED)), result.settings)
    made, other, best = to_proto(again), to_proto(plain), result.model
    assert made.graph.node == best.graph.node and (other != best) == bool(steps)
    # The runtime fuses other nodes where other tensors are looked at, which is a last digit of a range.
    for one, two in zip(made.graph.initializer, best.graph.initializer, strict=True):
        np.testing.assert_allclose(numpy_helper.to_array(one), numpy_helper.to_array(two), rtol=1e-6, err_msg=one.name)


def test_only_what_gains_is_kept() -> None:
    result = found(mlp(), vectors(8), WORSE, weights_of("int16"), weights_of("int8"))
    names = [(trial.step, trial.result) for trial in result.trials]
    assert names == [("the config as it is", "kept"), ("worse", "no gain"), ("int16", "kept"), ("int8", "no gain")]
    plain, worse, better, back = result.trials
    assert worse.after is not None and worse.after < result.plain - 10
    assert plain.after == worse.before == better.before == back.after == result.plain
    assert better.after == back.before == result.score > result.plain
    assert result.settings.specs.layer.weight == onnx_range(spec("int16"))


def test_for_l2_less_is_better() -> None:
    result = found(mlp(), vectors(8), WORSE, weights_of("int16"), metric=Metric("l2"), target=1.0)
    assert [trial.result for trial in result.trials] == ["kept", "no gain", "kept"]
    assert result.score < result.plain and not result.reached
    assert found(mlp(), vectors(8), metric=Metric("l2"), target=1.2 * result.plain).reached


@pytest.mark.slow
def test_the_target_ends_the_search() -> None:
    plain = found(mlp(), vectors(8)).score
    result = found(mlp(), vectors(8), weights_of("int16"), WORSE, target=plain + 0.1)
    assert result.reached and [trial.step for trial in result.trials] == ["the config as it is", "int16"]
    sure = found(mlp(), vectors(8), target=plain)
    assert not sure.reached and sure.least < plain  # on these samples alone
    assert len(found(mlp(), vectors(8), weights_of("int16"), target=sure.least).trials) == 1
    assert not found(mlp(), vectors(8), weights_of("int16"), target=200.0).reached


@pytest.mark.slow
def test_badly_scaled_channels_come_back_by_the_chain() -> None:
    """The steps together regain what CLE by hand gains."""
    bad, feeds = badly_scaled(chain(), CHAIN), images(8)
    equalized = replace(S8, algorithms=(CLEConfig(cle_scale_use_threshold=False, cle_steps=4),))
    by_hand = found(bad, feeds, settings=equalized).plain
    result = ModelQuantizer(CONFIG).recover(bad, None, feeds, budget="1m", target=by_hand - 1)
    assert result.reached and by_hand > result.plain + 5
    assert measured("sqnr", bad, result.model, [feeds[i] for i in HELD_OUT]) == pytest.approx(result.score, rel=1e-4)
    assert {trial.step: trial.result for trial in result.trials}["CLE"] == "kept"


@pytest.mark.slow
def test_every_range_comes_from_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    collect = calibrate_module.collect
    monkeypatch.setattr(calibrate_module, "collect", lambda *given: passes.append(1) or collect(*given))
    steps = [step for step in STEPS if step.name.startswith("ranges:")]
    result = found(cnn(), images(8), *steps)
    assert len(result.trials) == 4 and len({trial.after for trial in result.trials}) == 4
    assert len(passes) == 1


def test_ranges_of_the_plain_config_come_back_with_an_algorithm() -> None:
    """Found only where both change at once: the other ranges are what the algorithm makes needless."""

    def algorithm(settings: Settings, _: Situation) -> Settings:
        return replace(settings, algorithms=(*settings.algorithms, "it"))

    change = with_plain_ranges(algorithm)
    situation = Situation(S8)
    assert change(S8, situation) is None
    other = ranges("entropy")(replace(S8, algorithms=("kept",)), situation)
    assert isinstance(other, Settings) and other.specs.layer.input != S8.specs.layer.input
    assert change(other, situation) == replace(S8, algorithms=("kept", "it"))


def test_biases_are_corrected_after_the_weights_are_learned() -> None:
    tuned, short = AdaRoundConfig(num_iterations=5), AdaQuantConfig(num_iterations=5)
    settings = replace(S8, algorithms=(CLEConfig(), short, BiasCorrectionConfig()))
    every = tuning(tuned)(settings, Situation(S8))
    assert isinstance(every, Settings) and every.algorithms == (CLEConfig(), tuned, BiasCorrectionConfig())
    worst = tuning(tuned)(settings, Situation(S8, share=0.3))
    expected = (CLEConfig(), short, WorstLayers(tuned, AFTER[AdaRoundConfig], 0.3), BiasCorrectionConfig())
    assert isinstance(worst, Settings) and worst.algorithms == expected
    assert tuning(tuned)(every, Situation(S8)) is None


def test_power_of_two_scales_keep_their_methods() -> None:
    settings = with_layer(S8, LayerSpec(weight=spec("int8"), input=spec("int8", scale_type=ScaleType.pof2)))
    names = {step.name: step.change(settings, Situation(settings)) for step in STEPS if step.name.startswith("ranges:")}
    observers = {
        name: s.specs.layer.input.observer
        for name, s in names.items()
        if isinstance(s, Settings) and s.specs.layer.input
    }
    assert observers == {"ranges: MinMax": "pof2_non_overflow", "ranges: MinMSE": "pof2_min_mse"}


@pytest.mark.slow
def test_weights_of_four_bits_are_solved() -> None:
    four = with_layer(S8, LayerSpec(weight=spec("int4", observer="min_max")))
    step = Step("gptq", solve_few_bits)
    data = vectors(16)
    result = found(mlp(), data, step, settings=four)
    assert [trial.result for trial in result.trials] == ["kept", "kept"] and result.score > result.plain + 0.5
    assert any(isinstance(one, GPTQConfig) for one in result.settings.algorithms)
    assert solve_few_bits(S8, Situation(S8)) is None
    assert solve_few_bits(result.settings, Situation(four)) is None


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "target"), (("sqnr", 45.0), ("psnr", 55.0), ("cosine", 0.99999), ("l2", 0.15)))
def test_as_many_layers_get_more_bits_as_the_target_takes(metric: str, target: float) -> None:
    result = found(cnn(), images(8), RAISE, metric=Metric(metric), target=target)
    weights = [tensor for tensor in result.model.graph.initializer if tensor.name.endswith("w_quantized")]
    types = [tensor.data_type for tensor in weights]
    assert reaches(result.score, target, result.metric) and not reaches(result.plain, target, result.metric)
    assert 0 < types.count(TensorProto.INT16) < types.count(TensorProto.INT8) + types.count(TensorProto.INT16) == 7


def test_more_bits_are_for_a_target_and_for_runtimes_that_have_them() -> None:
    goal = Goal(target=45.0)
    assert str(RAISE.change(S8, Situation(S8))).startswith("needs a target")
    ort = replace(S8, qdq=QDQSettings(target="ort_x64"))
    assert RAISE.change(ort, Situation(S8, 1.0, goal)) == "the target ort_x64 has 8 bits only"
    half = with_layer(S8, LayerSpec(weight=spec("bfloat16"), input=spec("bfloat16")))
    assert RAISE.change(half, Situation(half, 1.0, goal)) is None
    four = with_layer(S8, LayerSpec(weight=spec("int4")))
    changed = RAISE.change(four, Situation(four, 1.0, goal))
    assert isinstance(changed, Settings) and changed.specs.mixed == (
        (LayerSpec(weight=onnx_range(spec("int8"))), None),
    )


def test_for_more_bits_the_worst_output_counts() -> None:
    """Only the layer behind it is raised."""
    plain = found(two_heads(), vectors(8))
    result = found(two_heads(), vectors(8), RAISE, target=plain.plain + 5)
    types = {tensor.name: tensor.data_type for tensor in result.model.graph.initializer}
    assert (types["fine_w_quantized"], types["rough_w_quantized"]) == (TensorProto.INT8, TensorProto.INT16)


def test_sixteen_bits_need_neither_clipping_nor_training() -> None:
    clipped = ranges("entropy")(S8, Situation(S8))
    assert isinstance(clipped, Settings) and clipped.specs.layer.input is not None
    clipped = replace(clipped, algorithms=(CLEConfig(), AdaRoundConfig(num_iterations=5)))
    raised = raise_all_bits(clipped, Situation(S8, 1.0, Goal(target=45.0)))
    assert isinstance(raised, Settings) and raised.specs.layer.input is not None
    assert (raised.specs.layer.input.dtype.name, raised.specs.layer.input.observer) == ("uint16", "min_max")
    assert raised.algorithms == (CLEConfig(),)
    four = with_layer(clipped, LayerSpec(weight=spec("int4")))
    raised = raise_all_bits(four, Situation(S8, 1.0, Goal(target=45.0)))
    assert isinstance(raised, Settings) and raised.algorithms == clipped.algorithms


def test_what_no_choice_of_layers_reaches_is_tried_with_all() -> None:
    result = found(two_heads(), vectors(8), RAISE, Step("all", raise_all_bits), target=500.0)
    few, everything = result.trials[1:]
    assert few.after is None and "is not reached" in few.result and everything.result == "kept"
    assert result.settings.specs.layer.weight == onnx_range(spec("int16")) and not result.settings.algorithms


# Algorithms that a test can steer. ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fake:
    """An algorithm before placement, which does what `act` says."""

    act: Any


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(BEFORE, Fake, lambda model, config, settings, data: config.act(data))
    yield


def fake_step(act: Any, name: str = "fake", **more: Any) -> Step:
    return Step(name, lambda settings, _: replace(settings, algorithms=(*settings.algorithms, Fake(act))), **more)


@pytest.mark.usefixtures("fake")
def test_a_step_that_fails_is_told_and_leaves_the_best() -> None:
    def diverge(data: Any) -> int:
        raise ConfigError("layer 3\ndiverges.")

    none = Step("no op type", lambda settings, _: replace(settings, specs=replace(settings.specs, op_types=("Relu",))))
    result = found(mlp(), vectors(8), fake_step(diverge), fake_step(lambda data: 0), none, weights_of("int16"))
    assert [trial.result for trial in result.trials[1:]] == [
        "layer 3 diverges",
        "nothing in this model qualifies",
        "no node would stay in integers",
        "kept",
    ]
    assert result.trials[1].after is None


@pytest.mark.usefixtures("fake")
def test_a_step_within_which_the_time_ends_is_stopped() -> None:
    def late(data: Any) -> int:
        data.until = 0.0
        return len(data[0])

    result = found(mlp(), vectors(8), weights_of("int16"), fake_step(late), weights_of("int8"), budget=1000.0)
    assert [trial.result for trial in result.trials[:3]] == ["kept", "kept", "stopped: the budget ended"]
    assert result.settings.specs.layer.weight == onnx_range(spec("int16"))


def test_a_step_for_which_there_is_no_time_is_skipped() -> None:
    result = found(mlp(), vectors(8), weights_of("int16"), budget=1e-9)
    assert result.score == result.plain and len(result.trials) == 2
    assert result.trials[1].result.startswith("skipped: about ") and result.trials[1].result.endswith("and 0 s left")


@pytest.mark.slow
@pytest.mark.usefixtures("fake")
def test_a_long_step_takes_as_many_layers_as_there_is_time_for() -> None:
    seen: list[float] = []

    def slow(data: Any) -> int:
        time.sleep(0.3)
        return 1

    def change(settings: Settings, situation: Situation) -> Settings | None:
        seen.append(situation.share)
        return None

    long = Step("long", change, like="fake", factor=1000)
    found(mlp(), vectors(8), weights_of("int8"), fake_step(slow), long, budget=30.0)
    assert 0.02 < seen[0] < 0.8 * 30 / (1000 * 0.25)
    found(mlp(), vectors(8), weights_of("int8"), fake_step(slow), long)
    assert seen[1] == 1.0


@pytest.mark.usefixtures("fake")
def test_time_is_kept_for_the_last_resort_where_there_is_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark.onnx.search.recovery.search.RESERVE", 100.0)
    seen = []

    def greedy(data: Any) -> int:
        seen.append(data.until)
        return 1

    def late(data: Any) -> int:
        data.until = 0.0
        return len(data[0])

    resort = replace(weights_of("int16"), last_resort=True)
    for target, kept in ((None, False), (500.0, True)):
        start = time.monotonic()
        result = found(mlp(), vectors(8), fake_step(greedy), fake_step(late), resort, target=target, budget=1000.0)
        assert [trial.result for trial in result.trials[2:]] == ["stopped: the budget ended", "kept"]
        reserve = 1000.0 - (seen[-1] - start)
        assert (reserve > 50 * result.trials[0].seconds) == kept


# Bad input. -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("least", "tried"), [pytest.param(-50.0, True, marks=pytest.mark.slow), (0.1, True), (200.0, False)]
)
@pytest.mark.parametrize(
    "metric", [pytest.param(name, marks=[] if name == "sqnr" else pytest.mark.slow) for name in UNITS]
)
def test_what_gained_too_little_is_not_tried_for_longer(metric: str, least: float, tried: bool) -> None:
    """int16 gains, by the same dB of noise in each metric; a third step follows what was left out, and is too."""
    first = weights_of("int16")
    steps = [
        first,
        replace(WORSE, name="longer", follows=first.name, least=least),
        replace(WORSE, name="longest", follows="longer", least=-1000.0),
    ]
    result = found(mlp(), vectors(8), *steps, metric=Metric(metric))
    last = {trial.step: trial for trial in result.trials}
    assert (last["longer"].after is not None) == (last["longest"].after is not None) == tried
    if not tried:
        text = r"left out: int16 gained (\d+\.\d+) dB, and this is tried only where that gains 200\.0 dB"
        gain = re.fullmatch(text, last["longer"].result)
        assert gain is not None and last["longest"].result == last["longer"].result
        before, after = (
            Metric(metric).noise(float(value or 0), 1) for value in (last["int16"].before, last["int16"].after)
        )
        assert float(gain[1]) == pytest.approx(10 * math.log10(before / after), abs=0.006)
    wanted = found(mlp(), vectors(8), *steps, metric=Metric(metric), target=0 if Metric(metric).falls else 1e9)
    assert all(trial.after is not None for trial in wanted.trials)


@pytest.mark.slow
def test_steps_follow_steps_before_them() -> None:
    names = [step.name for step in STEPS]
    following = [step for step in STEPS if step.follows]
    assert len(following) == 6 and all(names.index(one.follows) < names.index(one.name) for one in following)


@pytest.mark.parametrize(
    ("feeds", "came"), (([], "are 0"), (vectors(1), "is 1"), (vectors(3), "are 3"), (None, "are 0"))
)
def test_too_few_samples_are_refused(feeds: Any, came: str) -> None:
    with pytest.raises(CalibrationError, match=f"at least 4 samples are needed, and there {came}"):
        found(mlp(), feeds)


def test_the_sample_limit_counts_before_the_split() -> None:
    assert found(mlp(), vectors(8), settings=replace(S8, calibration=replace(S8.calibration, samples=5))).fitted == 4
    with pytest.raises(CalibrationError, match="there are 2"):
        found(mlp(), vectors(8), settings=replace(S8, calibration=replace(S8.calibration, samples=2)))


@pytest.mark.parametrize(("text", "seconds"), (("90s", 90), ("10m", 600), ("1.5 h", 5400), (7, 7), (0.5, 0.5)))
def test_a_budget_is_a_number_with_a_unit(text: Any, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ("", "10", "ten minutes", "-1m", "10 d", "0s", 0, -1, True))
def test_a_budget_that_is_no_time_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match="as in 90s, 10m or 1h"):
        duration(text)


def test_what_recovery_cannot_do_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="There is no metric 'snr'. Did you mean 'sqnr' or 'psnr'"):
        ModelQuantizer(CONFIG).recover(mlp(), None, vectors(8), metric="snr")
    for target in (math.nan, "30"):
        with pytest.raises(ConfigError, match=f"The target {target!r} is no number; possible: a value of sqnr"):
            ModelQuantizer(CONFIG).recover(mlp(), None, vectors(8), target=target)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="leave out Statistics"):
        found(
            mlp(),
            vectors(8),
            settings=replace(S8, calibration=replace(S8.calibration, statistics=str(tmp_path / "s.npz"))),
        )
    with pytest.raises(ConfigError, match="not both"):
        ModelQuantizer(CONFIG).recover(mlp(), None, vectors(8), "data.npz")


def test_a_model_without_comparable_outputs_is_refused() -> None:
    b = Builder()
    b.node("MatMul", ["x", b.constant("w", b.random.normal(0, 1, (32, 16)))], "y")
    b.node("ArgMax", ["y"], "best")
    b.node("NonZero", [b.node("Relu", ["y"], "positive")], "where")
    b.node("Cast", ["where"], "places", to=TensorProto.FLOAT)
    model = b.model({"x": ["n", 32]}, {"y": ["n", 16]})
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("best", TensorProto.INT64, None))
    with pytest.raises(NotSupportedError, match="no float output"):
        found(model, vectors(4))
    model.graph.output.append(helper.make_tensor_value_info("places", TensorProto.FLOAT, None))
    with pytest.raises(NotSupportedError, match="The output places is .* its shape follows from values"):
        found(model, vectors(4))


def test_an_algorithm_without_use_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def quantized(*algorithms: Any, **options: Any) -> onnx.ModelProto | None:
        config = QConfig(CONFIG.global_config, algo_config=list(algorithms), **options)
        return ModelQuantizer(config).quantize_model(mlp(), None, vectors(4))

    assert quantized(CLEConfig()) == quantized()
    assert "CLEConfig: nothing in this model qualifies" in caplog.text
    with pytest.raises(NothingQualifiesError, match="qualifies. Possible: leave it out, or AllowNoop=True"):
        quantized(CLEConfig(), AllowNoop=False)


def test_a_recovery_goes_on_from_an_algorithm_without_use() -> None:
    """A step that finds nothing is a row only where the config is free of such algorithms itself."""
    tolerant = replace(S8, algorithms=(CLEConfig(),))
    result = found(mlp(), vectors(8), weights_of("int16"), settings=tolerant)
    assert [trial.result for trial in result.trials] == ["kept", "kept"] and result.score > result.plain
    with pytest.raises(NothingQualifiesError):
        found(mlp(), vectors(8), settings=replace(tolerant, allow_noop=False))


def test_a_step_to_more_bits_waits_to_be_allowed() -> None:
    wider = Step("all", raise_all_bits, wider=True)
    for allowed, kind in ((False, "int8"), (True, "int16")):
        result = found(mlp(), vectors(8), wider, target=60.0, allow_wider=allowed)
        assert {name for name, _ in result.types} == {kind.replace("int", "uint"), kind}
        kinds = {t.data_type for t in result.model.graph.initializer if t.name.endswith("_zero_point")}
        assert (TensorProto.INT16 in kinds) is allowed
        assert ("left out: more bits" in result.trials[-1].result) is not allowed


def test_a_change_that_reads_samples_ends_with_the_budget() -> None:
    def change(settings: Settings, situation: Situation) -> Settings:
        assert situation.prepared is not None and situation.prepared.data is not None
        situation.prepared.data.until = -math.inf
        return replace(settings, allow_noop=bool(len(situation.prepared.data[0])))

    trial = found(mlp(), vectors(8), Step("reads", change)).trials[-1]
    assert (trial.step, trial.after, trial.result) == ("reads", None, "stopped: the budget ended")


@pytest.mark.parametrize(
    ("seconds", "result"), [(264.0, 88), (263.9, 80), (72.0, 24), (71.0, "about 72 s, and 71 s left")]
)
def test_nodes_in_float_are_found_in_fewer_runs_or_left_out_where_time_is_short(
    monkeypatch: pytest.MonkeyPatch, seconds: float, result: int | str
) -> None:
    """88 runs of the first sample and 44 of the second, of 2 s each with noise."""

    def runs_of(_: Any, config: FloatNodes, settings: Settings, *__: Any) -> Settings:
        return replace(settings, least_sqnr=config.runs)

    monkeypatch.setattr("quark.onnx.search.recovery.steps.leave_in_float", runs_of)
    situation = Situation(S8, goal=Goal(target=30.0), prepared=Prepared(load(mlp())), forward=1.0, seconds=seconds)
    got = floating(FloatNodes())(S8, situation)
    if isinstance(result, str):
        assert isinstance(got, str) and result in got
    else:
        assert isinstance(got, Settings) and got.least_sqnr == result


def test_ranges_of_each_tensor_are_left_out_where_time_is_short() -> None:
    got = tensor_ranges(TensorRanges())(S8, Situation(S8, prepared=Prepared(load(mlp())), forward=1.0, seconds=100.0))
    assert got == "skipped: about 224 s, and 100 s left"


@pytest.mark.parametrize(("longer", "kept"), [(1.5, False), (1.01, True)])
def test_a_step_with_a_price_is_kept_where_its_gain_is_worth_the_time_of_its_file(
    longer: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain file takes half of the time of the float model, so that one of 1.5 times its time costs 25 % more."""
    ratios = iter([0.5, longer])
    monkeypatch.setattr(search_module, "time_ratio", lambda *_: next(ratios))
    plain, step = found(mlp(), vectors(8), replace(weights_of("int16"), price=1.0)).trials
    assert plain.after is not None and step.after is not None and 0.5 < step.after - plain.after < 25
    assert (step.result == "kept") == kept and ("25.0% of the time of the float model" in step.result) != kept
