"""SmoothQuant: the float model stays what it was, outliers move into the weights, and no Mul stands in excess."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType

from quark.core.granularity import PerChannel
from quark.core.metrics import sqnr
from quark.core.solvers.smooth import output_noise
from quark.core.spec import LayerSpec, spec
from quark.errors import CalibrationError, ConfigError, NonFiniteError
from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, QuantizationConfig, UInt8Spec
from quark.onnx.algorithms.rescaling.smooth_quant import smooth
from quark.onnx.config.algo_configs import SmoothQuantConfig
from quark.onnx.config.config import Config
from quark.onnx.config.settings import QDQSettings, Settings, SpecSettings
from quark.onnx.graph.model_file import infer_shapes, load, to_proto
from quark.onnx.search.settle import quantize
from tests.models.onnx_zoo import Array, Builder, Reader, run

LAYER = LayerSpec(weight=spec("int8", PerChannel(0)), input=spec("uint8", symmetric=False))
PLAIN = Settings(SpecSettings(LAYER, op_types=("MatMul", "Gemm")))
ORT = Settings(SpecSettings(LAYER), qdq=QDQSettings(target="ort_x64"))
SPREAD = np.where(np.arange(32) % 8 == 3, 40.0, 1.0)
"""Four of 32 channels are 40 times as large."""


def feeds(count: int = 3, seed: int = 1) -> list[dict[str, Array]]:
    random = np.random.default_rng(seed)
    return [{"x": random.normal(size=(4, 16, 32)).astype(np.float32)} for _ in range(count)]


def weight(b: Builder, name: str, rows: int, columns: int, spread: bool = False) -> str:
    """A matrix; with `spread`, what comes through its outlier columns is made small again by the next layer's rows."""
    array = b.random.normal(0, rows**-0.5, (rows, columns))
    return b.constant(name, array * SPREAD if spread else array)


def reader(b: Builder, x: str, name: str, columns: int = 8) -> str:
    return b.node(
        "MatMul", [x, b.constant(f"{name}_w", b.random.normal(0, 0.2, (32, columns)) / SPREAD[:, None])], name
    )


def normed(b: Builder) -> str:
    """A layer norm with outlier gains, read by two linear layers."""
    gain, bias = b.constant("gain", SPREAD), b.constant("bias", b.random.normal(0, 0.1, 32) * SPREAD)
    h = b.node("LayerNormalization", ["x", gain, bias], "h", axis=-1)
    return b.node("Add", [reader(b, h, "q"), reader(b, h, "k")], "y")


def residual(b: Builder) -> str:
    """The same, but the norm is added to what comes behind, as after the norm of BERT."""
    gain, bias = b.constant("gain", SPREAD), b.constant("bias", b.random.normal(0, 0.1, 32) * SPREAD)
    h = b.node("LayerNormalization", ["x", gain, bias], "h", axis=-1)
    total = b.node("Add", [reader(b, h, "q", 32), reader(b, h, "k", 32)], "total")
    return b.node("Add", [total, h], "y")


def shared_gain(b: Builder) -> str:
    """Two norms that read one gain, as exporters write equal constants."""
    gain = b.constant("gain", SPREAD)
    first = reader(b, b.node("LayerNormalization", ["x", gain], "h", axis=-1), "q", 32)
    return reader(b, b.node("LayerNormalization", [first, gain], "h2", axis=-1), "y")


def rectified(b: Builder) -> str:
    """MatMul, Add of a bias, Relu, MatMul."""
    h = b.node("MatMul", ["x", weight(b, "up_w", 32, 32, spread=True)], "up")
    h = b.node("Add", [b.constant("up_b", b.random.normal(0, 1, 32) * SPREAD), h], "biased")
    return reader(b, b.node("Relu", [h], "h"), "y")


def gated(b: Builder) -> str:
    """down(silu(gate(x)) * up(x)): up takes the scale."""
    gate = b.node("MatMul", ["x", weight(b, "gate_w", 32, 32)], "gate")
    silu = b.node("Mul", [gate, b.node("Sigmoid", [gate], "sigmoid")], "silu")
    up = b.node("MatMul", ["x", weight(b, "up_w", 32, 32, spread=True)], "up")
    return reader(b, b.node("Mul", [silu, up], "h"), "y")


def halved(b: Builder) -> str:
    """A constant factor of one value, behind what does not commute with a scale."""
    x = b.node("Tanh", [b.node("MatMul", ["x", weight(b, "up_w", 32, 32)], "up")], "tanh")
    x = b.node("Mul", [x, b.constant("spread", SPREAD)], "wide")
    return reader(b, b.node("Mul", [b.node("Sin", [x], "sine"), b.constant("half", np.array(20.0))], "h"), "y")


def gelu(b: Builder) -> str:
    """Gelu, through which nothing can be folded."""
    h = b.node("MatMul", ["x", weight(b, "up_w", 32, 32, spread=True)], "up")
    return reader(b, b.node("Gelu", [h], "h"), "y")


def from_input(b: Builder) -> str:
    """Linear layers that read an input of the model."""
    return b.node("Add", [reader(b, "x", "q"), reader(b, "x", "k")], "y")


def shown(b: Builder) -> str:
    """A norm that is an output too."""
    h = b.node("LayerNormalization", ["x", b.constant("gain", SPREAD)], "h", axis=-1)
    return reader(b, h, "y")


def gemms(b: Builder) -> str:
    """Gemm with transB and a bias, LeakyRelu, Gemm with transB; of rows."""
    x = b.node("Reshape", ["x", b.integers("rows", [-1, 32])], "flat")
    bias = b.constant("one_b", b.random.normal(0, 1, 32) * SPREAD)
    first = b.constant("one_w", b.random.normal(0, 0.2, (32, 32)) * SPREAD[:, None])
    h = b.node("LeakyRelu", [b.node("Gemm", [x, first, bias], "one", transB=1)], "h")
    h = b.node("Gemm", [h, b.constant("two_w", b.random.normal(0, 0.2, (8, 32)) / SPREAD)], "two", transB=1)
    return b.node("Reshape", [h, b.integers("shape", [-1, 16, 8])], "y")


def flattened(b: Builder) -> str:
    """A norm whose rows a Gemm reads, as torch exports GPT-2."""
    h = b.node("LayerNormalization", ["x", b.constant("gain", SPREAD)], "h", axis=-1)
    h = b.node("Reshape", [h, b.integers("rows", [-1, 32])], "flat")
    h = b.node("Gemm", [h, b.constant("w", b.random.normal(0, 0.2, (32, 8)) / SPREAD[:, None])], "rows_y")
    return b.node("Reshape", [h, b.integers("shape", [-1, 16, 8])], "y")


def contrib(op_type: str, *constants: str) -> Callable[[Builder], str]:
    """A norm of ONNX Runtime's own, whose second output is the sum that it normalizes."""

    def part(b: Builder) -> str:
        skips, names = op_type.startswith("Skip"), []
        for name in constants:
            names.append(b.constant(name, b.random.normal(1, 0.1, 32) * (1 if name == "added" else SPREAD)))
        inputs, outputs = (["x", "x", *names], ["h", "", "", "sum"]) if skips else (["x", *names], ["h"])
        domain = "com.microsoft" if skips else ""
        b.nodes.append(helper.make_node(op_type, inputs, outputs, name="norm", domain=domain, epsilon=1e-5))
        y = reader(b, "h", "q" if skips else "y", 32)
        return b.node("Add", [y, "sum"], "y") if skips else y

    return part


def build(part: Callable[[Builder], str], opset: int = 20) -> onnx.ModelProto:
    b = Builder()
    names = [part(b), *(["h"] if part is shown else [])]
    x, *outputs = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 16, None]) for n in ("x", *names))
    x.type.tensor_type.shape.dim[2].dim_value = 32
    graph = helper.make_graph(b.nodes, "g", [x], outputs, b.initializers)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def smoothed(
    model: onnx.ModelProto, settings: Settings = PLAIN, data: Any = None, alpha: float = 0.5
) -> tuple[int, onnx.ModelProto]:
    prepared = load(model)
    infer_shapes(prepared)
    count = smooth(prepared, SmoothQuantConfig(alpha), settings, feeds() if data is None else data)
    return count, to_proto(prepared)


def tensors(model: onnx.ModelProto) -> dict[str, Array]:
    return {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}


def muls(model: onnx.ModelProto) -> list[str]:
    return [node.input[0] for node in model.graph.node if node.name.endswith("_Smoothing")]


CASES: dict[str, tuple[Callable[[Builder], str], list[str]]] = {
    "normed": (normed, []),
    "residual": (residual, ["h"]),
    "shared_gain": (shared_gain, []),
    "rectified": (rectified, []),
    "gated": (gated, []),
    "halved": (halved, []),
    "gelu": (gelu, ["h"]),
    "from_input": (from_input, ["x"]),
    "shown": (shown, ["h"]),
    "gemms": (gemms, []),
    "flattened": (flattened, []),
    "LayerNormalization": (contrib("LayerNormalization", "gain", "bias"), []),
    "SimplifiedLayerNormalization": (contrib("SimplifiedLayerNormalization", "gain"), []),
    "RMSNormalization": (contrib("RMSNormalization", "gain"), []),
    "SkipLayerNormalization": (contrib("SkipLayerNormalization", "gain", "bias", "added"), []),
    "SkipSimplifiedLayerNormalization": (contrib("SkipSimplifiedLayerNormalization", "gain", "added"), []),
}
"""Each with the tensors that need a Mul."""


def case(name: str) -> onnx.ModelProto:
    return build(CASES[name][0], 23 if name == "RMSNormalization" else 17 if "Norm" in name else 20)


def samples(name: str) -> list[dict[str, Array]]:
    spread = SPREAD.astype(np.float32) if name == "from_input" else np.float32(1)
    return [{"x": feed["x"] * spread} for feed in feeds()]


@pytest.mark.parametrize("name", CASES)
def test_the_float_model_computes_what_it_did(name: str) -> None:
    """And the last linear layer's weight is multiplied: every case has something to smooth."""
    model, data = case(name), samples(name)
    count, done = smoothed(model, data=data)
    assert count >= 1 and muls(done) == CASES[name][1]
    last = [node for node in model.graph.node if node.op_type in ("MatMul", "Gemm")][-1].input[1]
    assert not np.allclose(tensors(done)[last], tensors(model)[last])
    for feed in data:
        reference = run(model, feed)
        np.testing.assert_allclose(run(done, feed), reference, rtol=1e-4, atol=1e-5 * np.abs(reference).max())


@pytest.mark.parametrize("name", CASES)
def test_outliers_cost_less(name: str) -> None:
    """At least 15 dB come back; of sines, which have no outliers, a little."""
    model, data = case(name), samples(name)
    plain, found = (
        sqnr(run(model, data[0]), run(to_proto(quantize(load(prepared), ORT, data)), data[0]))
        for prepared in (model, smoothed(model, ORT, data)[1])
    )
    assert found > plain + (0.1 if name == "halved" else 15)


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_the_scale_is_the_papers(alpha: float) -> None:
    """Equation 4, over both layers that read the norm; the gain is divided by what the rows are multiplied by."""
    model = case("normed")
    before, after = tensors(model), tensors(smoothed(model, alpha=alpha)[1])
    probe = build(shown)
    for tensor in probe.graph.initializer:
        if tensor.name == "gain":
            tensor.CopyFrom(numpy_helper.from_array(before["gain"], "gain"))
    probe.graph.node[0].input.append("bias")
    probe.graph.initializer.append(numpy_helper.from_array(before["bias"], "bias"))
    del probe.graph.output[0]
    largest = np.abs(np.concatenate([run(probe, feed).reshape(-1, 32) for feed in feeds()])).max(0)
    rows = np.maximum(np.abs(before["q_w"]).max(1), np.abs(before["k_w"]).max(1))
    expected = largest**alpha / rows ** (1 - alpha)
    for name in ("q_w", "k_w"):
        np.testing.assert_allclose(after[name], before[name] * expected[:, None], rtol=1e-4)
    for name in ("gain", "bias"):
        np.testing.assert_allclose(after[name], before[name] / expected, rtol=1e-4)


@pytest.mark.parametrize(("step", "coarse"), [(0.5, 1e-6), (1e-6, 0.05), (0.5, 0.05)])
def test_the_noise_is_what_rounding_costs(step: float, coarse: float) -> None:
    """The estimate against rounding itself, of a tensor and of a weight, within a tenth."""
    random = np.random.default_rng(0)
    x, w = random.normal(0, SPREAD, (4096, 32)), random.normal(0, 1, (32, 64))
    rounded_x, rounded_w = np.rint(x / step) * step, np.rint(w / coarse) * coarse
    expected = ((rounded_x @ rounded_w - x @ w) ** 2).sum(1).mean()
    found = output_noise(step, (w**2).sum(1), ((rounded_w - w) ** 2).sum(1), (x**2).mean(0))
    assert found == pytest.approx(expected, rel=0.1)


def test_what_gains_nothing_and_what_never_fires_keep_their_scale() -> None:
    even = case("normed")
    spread = {name: array for name, array in tensors(even).items() if name.endswith("_w")}
    for tensor in even.graph.initializer:
        value = spread[tensor.name] * SPREAD[:, None] if tensor.name in spread else tensors(even)[tensor.name] / SPREAD
        tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float32), tensor.name))
    count, done = smoothed(even)
    assert count == 1
    for name, array in tensors(even).items():
        np.testing.assert_array_equal(tensors(done)[name], array)

    dead = case("from_input")
    data = [{"x": feed["x"] * np.where(np.arange(32) == 5, 0, 1).astype(np.float32)} for feed in samples("from_input")]
    before, after = tensors(dead), tensors(smoothed(dead, data=data)[1])
    np.testing.assert_array_equal(after["q_w"][5], before["q_w"][5])
    assert after["x_smoothing"][5] == 1 and not np.allclose(after["q_w"][3], before["q_w"][3])


def test_a_mul_reads_floats_and_gives_codes() -> None:
    """Its input is quantized for the other readers only, its factor never, its output once for all linear layers."""
    targets = {"generic": LAYER, "npu": LayerSpec(weight=spec("int8"), input=spec("int8")), "ort_x64": LAYER}
    for (target, layer), name in product(targets.items(), ("residual", "from_input")):
        settings = Settings(SpecSettings(layer), qdq=QDQSettings(target=target))
        model = load(case(name))
        infer_shapes(model)
        smooth(model, SmoothQuantConfig(), settings, samples(name))
        done = quantize(model, settings, samples(name))
        (product_,) = (node for node in done.graph if (node.name or "").endswith("_Smoothing"))
        source, factor = product_.inputs
        assert source is not None and factor is not None
        producer = source.producer()
        assert producer is None or producer.op_type == "LayerNormalization", (target, name)
        assert factor.is_initializer()
        ((use, _),) = product_.outputs[0].uses()
        assert use.op_type == "QuantizeLinear"
        decoded = [reader for codes in use.outputs[0].uses() for reader in codes.node.outputs[0].uses()]
        assert {reader.node.op_type for reader in decoded} == {"MatMul"} and len(decoded) == 2
        if name == "residual":
            others = {reader.node.op_type for reader in source.uses()} - {"Mul"}
            assert others == ({"Add"} if target == "ort_x64" else {"QuantizeLinear"})


def test_what_does_not_qualify() -> None:
    assert smoothed(case("normed"), replace(PLAIN, specs=replace(PLAIN.specs, weights_only=True)))[0] == 0
    assert smoothed(case("normed"), replace(PLAIN, specs=replace(PLAIN.specs, op_types=("Add",))))[0] == 0
    half = LayerSpec(weight=spec("bfloat16"), input=spec("bfloat16"))
    assert smoothed(case("normed"), replace(PLAIN, specs=replace(PLAIN.specs, layer=half)))[0] == 0
    assert smoothed(case("normed"), replace(PLAIN, specs=replace(PLAIN.specs, exclude=("q_node",))))[0] == 1
    with pytest.raises(ConfigError, match=r"alpha=1.5: possible: 0 .* to 1"):
        smoothed(case("normed"), alpha=1.5)
    with pytest.raises(NonFiniteError, match="'x' of the calibration sample 0 holds NaN"):
        smoothed(case("from_input"), data=[{"x": np.full((1, 16, 32), np.nan, np.float32)}])


def test_moved_values_that_are_rounded_already_get_no_mul() -> None:
    """Where the tensor before a Reshape is quantized, its channels are rounded before a Mul could scale them."""
    b = Builder()
    h = b.node("Mul", ["x", b.node("Sigmoid", ["x"], "gate")], "silu")
    reader(b, b.node("Reshape", [h, b.integers("shape", [0, 0, 32])], "h"), "y")
    model = b.model({"x": ["n", 16, 32]}, {"y": ["n", 16, 8]})
    assert smoothed(model, Settings(SpecSettings(LAYER)), samples("from_input"))[0] == 0
    assert muls(smoothed(model, ORT, samples("from_input"))[1]) == ["h"]


def test_configs_reach_the_flow() -> None:
    model, data = case("residual"), feeds()
    layer = QLayerConfig(input_tensors=UInt8Spec(calibration_method=CalibMethod.MinMax), weight=Int8Spec())

    def quality(config: Any) -> float:
        done = ModelQuantizer(config).quantize_model(model, None, Reader(data))
        assert done is not None
        return sqnr(run(model, data[0]), run(done, data[0]))

    plain = quality(QConfig(layer, Target="ort_x64"))
    found = quality(QConfig(layer, algo_config=[SmoothQuantConfig()], Target="ort_x64"))
    assert found > plain + 10
    assert found == quality(QConfig(layer, algo_config=[SmoothQuantConfig(0.6)], Target="ort_x64", SmoothAlpha=0.5))
    legacy = {"activation_type": QuantType.QUInt8, "extra_options": {"Target": "ort_x64"}}
    old = [quality(Config(QuantizationConfig(**legacy, include_sq=asked))) for asked in (False, True)]
    assert old[1] > old[0] + 10
    with pytest.raises(CalibrationError, match="SmoothQuantConfig needs calibration data"):
        ModelQuantizer(QConfig(layer, algo_config=[SmoothQuantConfig()])).quantize_model(model)
    only = QConfig(layer, algo_config=[SmoothQuantConfig()], WeightsOnly=True, AllowNoop=False)
    with pytest.raises(ConfigError, match="SmoothQuantConfig: nothing in this model qualifies"):
        quality(only)
