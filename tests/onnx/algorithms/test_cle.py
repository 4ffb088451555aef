"""Cross-layer equalization: the float model stays what it was, and badly scaled channels come back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from benchmarks.algorithm_models import DIGITS
from benchmarks.algorithm_models import badly_scaled as hard_digits
from quark.core.metrics import sqnr
from quark.core.solvers.equalize import channel_range, equalizing_scale
from quark.core.spec import LayerSpec, spec
from quark.errors import ConfigError, NotSupportedError
from quark.onnx import (
    CalibMethod,
    CLEConfig,
    Int8Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    UInt8Spec,
)
from quark.onnx.algorithms import run_before
from quark.onnx.config.settings import Settings, SpecSettings
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.passes import PASSES
from quark.onnx.search.settle import quantize
from tests.models.onnx_zoo import Builder, Reader, cnn, images, mlp, run, vectors

EVERYWHERE = CLEConfig(cle_scale_use_threshold=False, cle_steps=4)


def badly_scaled(model: onnx.ModelProto, pairs: dict[str, str], seed: int = 0) -> onnx.ModelProto:
    """The same function with the channels between two convolutions rescaled by up to 100."""
    random = np.random.default_rng(seed)
    tensors = {i.name: i for i in model.graph.initializer}
    for first, second in pairs.items():
        array = numpy_helper.to_array(tensors[first])
        scale = 10.0 ** random.uniform(-1, 1, len(array)).astype(np.float32)
        other = numpy_helper.to_array(tensors[second])
        depthwise = other.shape[1] == 1
        tensors[first].CopyFrom(numpy_helper.from_array(array * scale.reshape(-1, 1, 1, 1), first))
        bias = tensors[first.removesuffix("w") + "b"]
        bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) * scale, bias.name))
        after = other / scale.reshape((-1, 1, 1, 1) if depthwise else (1, -1, 1, 1))
        tensors[second].CopyFrom(numpy_helper.from_array(after.astype(np.float32), second))
    return model


def chain() -> onnx.ModelProto:
    """Conv, Relu, depthwise Conv, LeakyRelu, MaxPool, Conv, PRelu, mean, Flatten, Gemm (transB), Relu, Gemm."""
    b = Builder()

    def conv(x: str, name: str, shape: tuple[int, ...], **attributes: Any) -> str:
        weight = b.constant(f"{name}_w", b.random.normal(0, 0.3, shape))
        bias = b.constant(f"{name}_b", b.random.normal(0, 0.3, shape[0]))
        return b.node("Conv", [x, weight, bias], name, **attributes)

    x = b.node("Relu", [conv("x", "one", (16, 3, 3, 3), pads=[1] * 4)], "r1")
    x = b.node("LeakyRelu", [conv(x, "two", (16, 1, 3, 3), group=16, pads=[1] * 4)], "r2", alpha=0.1)
    x = b.node("MaxPool", [x], "pooled", kernel_shape=[2, 2], strides=[2, 2])
    x = b.node("PRelu", [conv(x, "three", (24, 16, 1, 1)), b.constant("slope", np.full((24, 1, 1), 0.2))], "r3")
    x = b.node("Flatten", [b.node("GlobalAveragePool", [x], "mean")], "flat")
    weight, bias = b.constant("four_w", b.random.normal(0, 0.3, (20, 24))), b.constant("four_b", np.array(0.3))
    x = b.node("Gemm", [x, weight, bias], "four", transB=1)
    b.node("Gemm", [b.node("Relu", [x], "r4"), b.constant("five_w", b.random.normal(0, 0.3, (20, 10)))], "y")
    return b.model({"x": ["n", 3, 16, 16]}, {"y": ["n", 10]})


def perceptron() -> onnx.ModelProto:
    """MatMul, Add of a bias, Relu, MatMul; the channels between differ by 10^4."""
    b = Builder()
    scale = np.logspace(-2, 2, 64)
    hidden = b.node("MatMul", ["x", b.constant("w1", b.random.normal(0, 0.2, (32, 64)) * scale)], "hidden")
    hidden = b.node("Add", [hidden, b.constant("b1", b.random.normal(0, 0.2, 64) * scale)], "biased")
    weight = b.constant("w2", b.random.normal(0, 0.2, (64, 16)) / scale[:, None])
    b.node("MatMul", [b.node("Relu", [hidden], "rectified"), weight], "y")
    return b.model({"x": ["n", 32]}, {"y": ["n", 16]})


def rescale(model: Any, algorithms: Any, int32_bias: bool = True) -> int:
    layer = LayerSpec(weight=spec("int8"), input=spec("int8"))
    return run_before(model, Settings(SpecSettings(layer, int32_bias=int32_bias), algorithms=tuple(algorithms)), None)


CHAIN = {"one_w": "two_w", "two_w": "three_w"}
MODELS = {"chain": (chain, images, 4), "perceptron": (perceptron, vectors, 1)}


@pytest.mark.parametrize("name", MODELS)
def test_the_float_model_computes_what_it_did(name: str) -> None:
    make, feeds, pairs = MODELS[name]
    model = load(make())
    assert rescale(model, [EVERYWHERE]) == pairs
    (feed,) = feeds(1)
    reference = run(make(), feed)
    np.testing.assert_allclose(run(to_proto(model), feed), reference, rtol=1e-4, atol=1e-4 * np.abs(reference).max())


def test_ranges_of_a_pair_become_equal() -> None:
    """One step on one pair: both ranges are the geometric mean (the paper's equation 11)."""
    make = load(perceptron())
    rescale(make, [CLEConfig(cle_scale_use_threshold=False, cle_scale_append_bias=False)])
    tensors = {name: value.const_value.numpy() for name, value in make.graph.initializers.items()}  # type: ignore[union-attr]
    original = {i.name: numpy_helper.to_array(i) for i in perceptron().graph.initializer}
    first, second = channel_range(tensors["w1"], 1), channel_range(tensors["w2"], 0)
    expected = np.sqrt(np.abs(original["w1"]).max(0) * np.abs(original["w2"]).max(1))
    np.testing.assert_allclose(first, expected, rtol=1e-5)
    np.testing.assert_allclose(second, expected, rtol=1e-5)


def test_a_coarse_bias_counts_as_one_more_input() -> None:
    """With int8 biases the range of a channel is sqrt(w^2 + b^2 / inputs); with int32 ones that of its weights."""
    original = {i.name: numpy_helper.to_array(i).astype(np.float64) for i in perceptron().graph.initializer}
    weights, second = np.abs(original["w1"]).max(0), np.abs(original["w2"]).max(1)
    for coarse, appended in ((True, original["b1"] ** 2 / 32), (False, 0)):
        model = load(perceptron())
        rescale(model, [CLEConfig(cle_scale_use_threshold=False)], int32_bias=not coarse)
        found = model.graph.initializers["w1"].const_value.numpy()  # type: ignore[union-attr]
        expected = original["w1"] * np.sqrt(second / np.sqrt(weights**2 + appended))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_scale_keeps_channels_without_a_range_and_below_the_threshold() -> None:
    first, second = np.array([0.0, 1.0, 4.0, 0.1]), np.array([1.0, 0.0, 1.0, 0.1])
    assert equalizing_scale(first, second, 0.5).tolist() == [1, 1, 0.5, 1]
    assert equalizing_scale(np.array([1e-3]), np.array([10.0])).tolist() == [100.0]


@pytest.mark.parametrize("name", MODELS)
def test_most_of_what_bad_scales_cost_comes_back(name: str) -> None:
    """Per-tensor int8: at least 80 percent of the SQNR, in dB, that the rescaled channels lost."""
    make, feeds, _ = MODELS[name]
    good = make()
    bad = badly_scaled(make(), CHAIN) if name == "chain" else make()
    if name == "perceptron":
        prepared = load(make())
        rescale(prepared, [CLEConfig(cle_scale_use_threshold=False)])
        good = to_proto(prepared)
    settings = Settings(SpecSettings(LayerSpec(weight=spec("int8"), input=spec("uint8", symmetric=False))))
    (feed,) = feeds(1)
    reference = run(bad, feed)

    def quality(model: onnx.ModelProto, *algorithms: Any) -> float:
        prepared = load(model)
        rescale(prepared, algorithms)
        return sqnr(reference, run(to_proto(quantize(prepared, settings, Reader(feeds()))), feed))

    best, worst, recovered = quality(good), quality(bad), quality(bad, EVERYWHERE)
    assert best - worst > 5
    assert recovered >= best - 0.2 * (best - worst)


def test_well_scaled_models_lose_nothing() -> None:
    settings = Settings(SpecSettings(LayerSpec(weight=spec("int8"), input=spec("uint8", symmetric=False))))
    (feed,) = images(1)
    found = []
    for algorithms in ([], [EVERYWHERE]):
        model = load(cnn())
        PASSES["fold_batch_norm"](model)
        rescale(model, algorithms)
        found.append(sqnr(run(cnn(), feed), run(to_proto(quantize(model, settings, Reader(images()))), feed)))
    assert found[1] > found[0] - 0.1


@pytest.mark.slow
def test_configs_reach_the_flow(caplog: pytest.LogCaptureFixture) -> None:
    layer = QLayerConfig(input_tensors=UInt8Spec(calibration_method=CalibMethod.MinMax), weight=Int8Spec())
    bad, (feed,) = badly_scaled(chain(), CHAIN), images(1)

    def quality(*algorithms: Any, argument: Any = None) -> float:
        quantizer = ModelQuantizer(QConfig(layer, algo_config=list(algorithms)))
        done = quantizer.quantize_model(bad, None, Reader(images()), algorithms=argument)
        assert done is not None
        return sqnr(run(bad, feed), run(done, feed))

    plain = quality()
    assert quality(EVERYWHERE) > plain + 5
    assert quality(argument=[EVERYWHERE]) == quality(EVERYWHERE)

    class Unknown(CLEConfig):
        """Not registered."""

    with pytest.raises(NotSupportedError, match="Unknown: not part of this version. Possible: CLEConfig"):
        quality(EVERYWHERE, Unknown())
    with pytest.raises(ConfigError, match="cle_balance_method"):
        quality(CLEConfig(cle_balance_method="mean"))
    for steps in (0, -2):
        with pytest.raises(ConfigError, match=f"cle_steps={steps}; possible: from 1, or -1"):
            quality(CLEConfig(cle_steps=steps))
    with pytest.raises(ConfigError, match="CLEConfig: nothing in this model qualifies"):
        strict = QConfig(layer, algo_config=[CLEConfig()], AllowNoop=False)
        ModelQuantizer(strict).quantize_model(mlp(), None, Reader(vectors()))


def test_what_two_nodes_read_is_left_alone() -> None:
    """A shared weight, a value read twice, and a value that is an output keep their scales."""
    model = perceptron()
    model.graph.output.append(onnx.helper.make_tensor_value_info("rectified", 1, ["n", 64]))
    assert rescale(load(model), [EVERYWHERE]) == 0
    shared = perceptron()
    node = shared.graph.node.add()
    node.CopyFrom(onnx.helper.make_node("MatMul", ["x", "w1"], ["other"], name="other"))
    shared.graph.output.append(onnx.helper.make_tensor_value_info("other", 1, ["n", 64]))
    assert rescale(load(shared), [EVERYWHERE]) == 0


@pytest.mark.slow
def test_the_embedded_network_gets_back_what_bad_scales_cost() -> None:
    data = np.load(DIGITS / "data.npz")
    seen, unseen = ((data[f"{name}_images"] / 16).astype(np.float32) for name in ("calibration", "heldout"))
    plain, reader = onnx.load(DIGITS / "model.onnx"), [{"image": image[None]} for image in seen]
    hard = hard_digits(onnx.load(DIGITS / "model.onnx"))
    expected = run(plain, {"image": unseen})
    assert sqnr(expected, run(hard, {"image": unseen})) > 100

    def after(model: onnx.ModelProto, *algorithms: Any) -> float:
        spec = Int8Spec(calibration_method=CalibMethod.MinMax)
        config = QConfig(QLayerConfig(input_tensors=spec, weight=spec), algo_config=list(algorithms))
        quantized = ModelQuantizer(config).quantize_model(model, None, Reader(reader))
        return sqnr(expected, run(quantized, {"image": unseen}))

    best, worst = after(plain), after(hard)
    assert best - worst > 20
    assert after(hard, CLEConfig()) > best - 0.05 * (best - worst)
    assert after(plain, CLEConfig()) > best - 0.1


# Gates. ---------------------------------------------------------------------------------------------------------------


def gated(form: str) -> onnx.ModelProto:
    """Conv, a gate, squeeze and excitation, a number added, Conv; the channels between differ by up to 100."""
    b = Builder()
    scale = 10.0 ** b.random.uniform(-1, 1, (8, 1, 1, 1))
    read = ["x", b.constant("first", b.random.normal(0, 0.2, (8, 3, 1, 1)) * scale), b.constant("bias", [0.1] * 8)]
    value = b.node("Conv", read, "hidden")
    if form == "HardSwish":
        value = b.node("HardSwish", [value], "act")
    elif form == "parts":
        ends = [b.constant(name, np.array(number)) for name, number in (("three", 3.0), ("low", 0.0), ("six", 6.0))]
        clipped = b.node("Clip", [b.node("Add", [value, ends[0]], "shifted"), *ends[1:]], "clipped")
        value = b.node("Div", [b.node("Mul", [value, clipped], "product"), ends[2]], "act")
    elif form == "SiLU":
        value = b.node("Mul", [value, b.node("Sigmoid", [value], "gate")], "act")
    else:
        value = b.node("Relu", [value], "act")
    weights = [b.constant(f"w{i}", b.random.normal(size=shape)) for i, shape in enumerate([(4, 8, 1, 1), (8, 4, 1, 1)])]
    squeeze = b.node("Conv", [b.node("GlobalAveragePool", [value], "mean"), weights[0]], "squeeze")
    excite = b.node("Conv", [b.node("Relu", [squeeze], "squeezed"), weights[1]], "excite")
    value = b.node("Mul", [value, b.node("HardSigmoid", [excite], "h")], "excited")
    value = b.node("Add", [value, b.constant("shift", np.array(0.3))], "moved")
    b.node(
        "Conv", [value, b.constant("second", b.random.normal(0, 0.2, (5, 8, 1, 1)) / scale.reshape(1, 8, 1, 1))], "y"
    )
    return b.model({"x": ["n", 3, 6, 6]}, {"y": ["n", 5, 6, 6]})


@pytest.mark.parametrize("form", ["HardSwish", "parts", "SiLU", "Relu"])
def test_equalization_goes_through_gates_and_changes_nothing_in_float(form: str) -> None:
    model, settings = gated(form), Settings(SpecSettings(LayerSpec()), equalization=EVERYWHERE)
    changed = load(model)
    assert run_before(changed, settings, None) == 2
    feed = {"x": np.random.default_rng(1).normal(0, 3, (2, 3, 6, 6)).astype(np.float32)}
    assert sqnr(run(model, feed), run(to_proto(changed), feed)) > 110
    assert [node.op_type for node in changed.graph].count("Mul") == {"Relu": 1, "HardSwish": 3}.get(form, 3)
    arrays = {
        name: value.const_value.numpy() for name, value in changed.graph.initializers.items() if value.const_value
    }
    ranges = channel_range(arrays["first"], 0)
    before = channel_range(numpy_helper.to_array(model.graph.initializer[0]), 0)
    assert ranges.max() / ranges.min() < before.max() / before.min() / 5
    plain = load(model)
    assert run_before(plain, replace(settings, equalization=replace(EVERYWHERE, cle_through_gates=False)), None) == 1


@pytest.mark.parametrize("form", ["parts", "Relu"])
def test_what_is_badly_scaled_before_a_gate_comes_back(form: str) -> None:
    feeds = [{"x": np.random.default_rng(i).normal(0, 3, (4, 3, 6, 6)).astype(np.float32)} for i in range(8)]
    left = {}
    for through in (False, True):
        layer = QLayerConfig(input_tensors=UInt8Spec(calibration_method=CalibMethod.MinMax), weight=Int8Spec())
        config = QConfig(layer, algo_config=[replace(EVERYWHERE, cle_through_gates=through)])
        made = ModelQuantizer(config).quantize_model(gated(form), None, Reader(feeds))
        assert made is not None
        left[through] = float(sqnr(run(gated(form), feeds[0]), run(made, feeds[0])))
    assert left[True] > left[False] + 3
