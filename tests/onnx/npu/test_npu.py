"""The XINT8 path: positions read back from the written file keep the NPU's limits; the DPU's operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from quark.core.metrics import sqnr
from quark.core.scales import QParams
from quark.core.spec import spec
from quark.errors import CalibrationError, ConfigError
from quark.onnx.calibration.qparams import rescaled
from quark.onnx.config import presets
from quark.onnx.config.config import Config, QConfig, QLayerConfig
from quark.onnx.config.enums import QuantGranularity
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.presets import get_default_config
from quark.onnx.config.settings import Settings
from quark.onnx.config.tensor_specs import Int8Spec, Int16Spec, XInt8Spec
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.npu.rules import RULES
from quark.onnx.npu.simulation import CONVERSIONS, mean_factor, simulate
from quark.onnx.placement.place import place
from quark.onnx.search.settle import quantize
from tests.models.onnx_zoo import Builder, Reader, cnn, images, mlp, outputs, run, vectors
from tests.models.torch_zoo import ROOT

DIGITS = ROOT / "examples" / "models" / "digits_cnn"
OPTIONS = {
    "shift_cut": "AdjustShiftCut",
    "shift_bias": "AdjustShiftBias",
    "shift_read": "AdjustShiftRead",
    "shift_write": "AdjustShiftWrite",
    "hard_sigmoid": "AdjustHardSigmoid",
    "swish": "AdjustShiftSwish",
}


def xint8(channel: bool = False, **options: Any) -> Settings:
    weight = XInt8Spec(quant_granularity=QuantGranularity.Channel if channel else QuantGranularity.Tensor)
    return lower(QConfig(QLayerConfig(input_tensors=XInt8Spec(), weight=weight), **options))


# A checker of its own: only the file, only the inequalities ----------------------------------------------------------


@dataclass
class File:
    """Positions of a written model."""

    model: onnx.ModelProto

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.constants = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
        self.producer = {name: node for node in graph.node for name in node.output}
        self.readers: dict[str, list[Any]] = {}
        for node in graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)

    def position(self, node: Any) -> Any:
        exact = -np.log2(self.constants[node.input[1]].astype(np.float64))
        assert np.array_equal(exact, np.rint(exact)), f"{node.name}: no power of two"
        return exact.astype(int)

    def input(self, node: Any, index: int) -> Any:
        producer = self.producer.get(node.input[index]) if index < len(node.input) else None
        return self.position(producer) if producer is not None and producer.op_type == "DequantizeLinear" else None

    def output(self, node: Any) -> Any:
        readers = self.readers.get(node.output[0], [])
        if len(readers) == 1 and readers[0].op_type in ("Relu", "Clip", "LeakyRelu", "Mul"):
            return self.output(readers[0])
        quantizers = [reader for reader in readers if reader.op_type == "QuantizeLinear"]
        return self.position(quantizers[0]) if quantizers else None

    def broken(self) -> set[str]:
        """Names of the rules that some node breaks."""
        found = set()
        for node in self.model.graph.node:
            output = self.output(node) if node.op_type != "QuantizeLinear" else None
            if output is None:
                continue
            a, b = self.input(node, 0), self.input(node, 1)
            if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul") and a is not None and b is not None:
                cut = a + b - output
                found |= {"shift_cut"} if np.any((cut < 0) | (cut > 16)) else set()
                bias = self.input(node, 2)
                if bias is not None:
                    leaky = self.readers[node.output[0]][0].op_type == "LeakyRelu"
                    low = 0 if leaky else np.minimum(0, -(24 - (8 + cut)))
                    shift = a + b - bias
                    found |= {"shift_bias"} if np.any((shift < low) | (shift > 15)) else set()
            if node.op_type in ("Add", "Sub") and a is not None and b is not None:
                found |= {"shift_read"} if abs(a - b) > 7 else set()
                found |= {"shift_write"} if not -7 <= min(a, b) - output <= 25 else set()
            if node.op_type == "Mul" and a is not None and b is not None:
                found |= {"shift_write"} if not 0 <= a + b - output <= 32 else set()
                gates = [self.gate_source(node.input[0]) == node.input[1],
                         self.gate_source(node.input[1]) == node.input[0]]  # fmt: skip
                found |= {"swish"} if any(gates) and not 0 <= a + b - output <= 15 else set()
            if node.op_type == "HardSigmoid" and a is not None:
                kept = 0 <= a <= 15 and output >= 7 and 0 <= 14 + a - output <= 31
                found |= set() if kept else {"hard_sigmoid"}
        return found

    def gate_source(self, name: str) -> str | None:
        """The tensor whose sigmoid this is."""
        node = self.producer.get(name)
        while node is not None and node.op_type in ("DequantizeLinear", "QuantizeLinear", "Mul"):
            node = self.producer.get(node.input[0])
        return node.input[0] if node is not None and node.op_type in ("Sigmoid", "HardSigmoid") else None


# Models --------------------------------------------------------------------------------------------------------------


def small(build: Callable[[Builder], None], channels: int = 4) -> onnx.ModelProto:
    b = Builder()
    build(b)
    return b.model({"x": ["n", channels, 4, 4]}, {"y": ["n", None, None, None]})


def feeds(channels: int = 4, low: float = -1.0, high: float = 1.0) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    return [{"x": random.uniform(low, high, (8, channels, 4, 4)).astype(np.float32)} for _ in range(2)]


def biased(b: Builder, weight: float, bias: float, activation: str = "Relu") -> None:
    names = [b.constant("w", b.random.normal(0, weight, (4, 4, 1, 1))), b.constant("b", b.random.normal(0, bias, 4))]
    b.node(activation, [b.node("Conv", ["x", *names], "c", kernel_shape=[1, 1])], "y")


def cancelling(b: Builder) -> None:
    """Weights of 1000 that cancel: the output is far finer than a product."""
    weight = np.full((4, 8, 1, 1), 1000.0)
    weight[:, 4:] = -999.9
    both = b.node("Concat", ["x", "x"], "both", axis=1)
    b.node("Conv", [both, b.constant("w", weight)], "y", kernel_shape=[1, 1])


def sum_of_unequals(b: Builder) -> None:
    tiny = b.node("Mul", ["x", b.constant("c", np.full((1, 4, 1, 1), 2.0**-12))], "tiny")
    b.node("Add", ["x", tiny], "y")


def difference_of_equals(b: Builder) -> None:
    near = b.node("Mul", ["x", b.constant("c", np.full((1, 4, 1, 1), 1 - 2.0**-14))], "near")
    b.node("Sub", ["x", near], "y")


def product_of_disjoint(b: Builder) -> None:
    negative = b.node("Mul", ["x", b.constant("c", np.full((1, 4, 1, 1), -1.0))], "negative")
    b.node("Mul", [b.node("Relu", ["x"], "above"), b.node("Relu", [negative], "below")], "y")


def gated(b: Builder) -> None:
    b.node("Mul", ["x", b.node("Sigmoid", ["x"], "gate")], "y")


def gated_beside_wide(b: Builder) -> None:
    """An aligned Concat makes the output of the gated product far coarser than the product."""
    product = b.node("Mul", ["x", b.node("Sigmoid", ["x"], "gate")], "product")
    wide = b.node("Mul", ["x", b.constant("c", np.full((1, 4, 1, 1), 2.0**13))], "wide")
    b.node("Relu", [b.node("Concat", [product, wide], "both", axis=1)], "y")


def leaky(b: Builder) -> None:
    biased(b, 1.0, 1e-6, "LeakyRelu")


BROKEN: dict[str, tuple[str, Callable[[Builder], None], tuple[float, float]]] = {
    "tiny weights": ("shift_cut", lambda b: biased(b, 2.0**-24, 1.0), (-1, 1)),
    "cancelling weights": ("shift_cut", cancelling, (0.5, 1)),
    "coarse bias": ("shift_bias", lambda b: biased(b, 2.0**-18, 1.0), (-1, 1)),
    "fine bias": ("shift_bias", lambda b: biased(b, 1.0, 2.0**-22), (-1, 1)),
    "fine bias before LeakyRelu": ("shift_bias", leaky, (-1, 1)),
    "unequal terms": ("shift_read", sum_of_unequals, (-1, 1)),
    "vanishing difference": ("shift_write", difference_of_equals, (-1, 1)),
    "vanishing product": ("shift_write", product_of_disjoint, (-1, 1)),
    "wide sigmoid": ("hard_sigmoid", gated, (-900, 900)),
    "gate beside a wide tensor": ("swish", gated_beside_wide, (-1, 1)),
}
"""Model -> the rule it breaks as calibrated, and the range of its data."""


@pytest.mark.parametrize("name", BROKEN)
def test_each_rule_is_broken_as_calibrated_and_kept_when_adjusted(name: str) -> None:
    rule, build, (low, high) = BROKEN[name]
    model, data = small(build), feeds(low=low, high=high)

    def broken(settings: Settings) -> set[str]:
        return File(to_proto(quantize(load(model), settings, Reader(data)))).broken()

    off: dict[str, Any] = {**dict.fromkeys(OPTIONS.values(), False), "NPULimitationCheck": False}
    assert rule in broken(xint8(**off))
    assert rule not in broken(xint8(**{**off, OPTIONS[rule]: True}))
    assert not broken(xint8())
    with pytest.raises(ConfigError, match=f"{rule} of .* is .* not in .*NPULimitationCheck=False"):
        broken(xint8(**{**off, "NPULimitationCheck": True}))


def test_every_rule_has_a_model_that_breaks_it() -> None:
    assert {rule for rule, _, _ in BROKEN.values()} == {*RULES} == {*OPTIONS}


def digits() -> onnx.ModelProto:
    return onnx.load(DIGITS / "model.onnx")


def digit_feeds() -> list[dict[str, Any]]:
    pixels = np.load(DIGITS / "data.npz")["calibration_images"]
    return [{"image": (part / 16).astype(np.float32)} for part in np.split(pixels, 4)]


MODELS = {"cnn": (cnn, images), "mlp": (mlp, vectors), "digits": (digits, digit_feeds)}
XINT8 = {
    "XINT8_QCONFIG": xint8(),
    "XINT8": lower(Config(get_default_config("XINT8"))),
    "per channel": xint8(channel=True),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", XINT8)
def test_written_models_keep_every_limit_and_run(name: str, model: str) -> None:
    make, read = MODELS[model]
    written = to_proto(quantize(load(make()), XINT8[name], Reader(read())))
    onnx.checker.check_model(written, full_check=True)
    assert File(written).broken() == set()
    kinds = {i.name: i.data_type for i in written.graph.initializer}
    assert onnx.TensorProto.INT32 not in kinds.values()
    (feed, *_) = read()
    # The mlp has a Sigmoid, which the DPU approximates by straight lines.
    assert sqnr(run(make(), feed), run(written, feed)) > (10 if model == "mlp" else 20)


def badly_scaled(make: Callable[[], onnx.ModelProto], factors: dict[str, float]) -> onnx.ModelProto:
    """The model with some BatchNormalizations scaled, whose folding scales the weights before them."""
    model = make()
    for initializer in model.graph.initializer:
        if initializer.name in factors:
            array = numpy_helper.to_array(initializer) * np.float32(factors[initializer.name])
            initializer.CopyFrom(numpy_helper.from_array(array.astype(np.float32), initializer.name))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", XINT8)
@pytest.mark.parametrize(
    ("model", "factors"),
    [
        ("cnn", {"a_g": 2.0**-20, "depth_g": 2.0**12, "b_b": 2.0**-10, "last_g": 2.0**-22}),
        ("digits", {"first.1.weight": 2.0**-20, "second.1.weight": 2.0**10, "wide.1.weight": 2.0**-22}),
    ],
)
def test_badly_scaled_networks_are_brought_within_reach(name: str, model: str, factors: dict[str, float]) -> None:
    make, read = MODELS[model]
    bad, (feed, *_) = badly_scaled(make, factors), read()
    free = replace(XINT8[name], npu=replace(XINT8[name].npu, rules=(), check=False))
    before, after = (to_proto(quantize(load(bad), s, Reader(read()))) for s in (free, XINT8[name]))
    assert {"shift_cut", "shift_bias"} <= File(before).broken() and File(after).broken() == set()
    reference = run(bad, feed)
    assert sqnr(reference, run(after, feed)) > sqnr(reference, run(before, feed)) - 3


@pytest.mark.parametrize("moved", [False, True])
def test_a_sigmoid_clips_nothing_that_it_meets_in_a_concat(moved: bool) -> None:
    """As in the heads of detectors: boxes of hundreds beside scores, whose position is at least 7."""
    b = Builder()
    b.node("Mul", ["a", "a"], "large")
    b.node("Sigmoid", ["b"], "small")
    small = b.node("Reshape", ["small", b.integers("shape", [1, 8])], "flat") if moved else "small"
    b.node("Concat", ["large", small], "y", axis=1)
    model = b.model({"a": [1, 8], "b": [1, 8]}, {"y": [1, 16]})
    draw = np.random.default_rng(0)
    feeds = [
        {"a": draw.uniform(0, 17, (1, 8)).astype(np.float32), "b": draw.normal(0, 3, (1, 8)).astype(np.float32)}
        for _ in range(16)
    ]
    written = to_proto(quantize(load(model), xint8(), Reader(feeds)))
    assert File(written).broken() == set()
    for feed in feeds:
        expected, found = run(model, feed), run(written, feed)
        assert np.abs(found - expected).max() <= 6  # half a step of 4, and what the steps of the input make of 17
    (concat,) = (node for node in written.graph.node if node.op_type == "Concat")
    scales = {tuple(numpy_helper.to_array(i).ravel()) for i in written.graph.initializer if i.name.endswith("_scale")}
    assert (np.float32(2**-7),) in scales and len(concat.input) == 2


@pytest.mark.parametrize("value", [1.393, 1.0, -0.74, 2.8, 0.0013])
@pytest.mark.parametrize("legacy", [True, False])
def test_a_single_constant_keeps_its_value_under_a_power_of_two(legacy: bool, value: float) -> None:
    """A learned factor: the power of two next to its scale would clip it, by up to 29 %; that above keeps 6 bits."""
    b = Builder()
    b.node("Mul", ["x", b.constant("factor", np.float32(value))], "y")
    model = b.model({"x": [1, 64]}, {"y": [1, 64]})
    feeds = [{"x": x[None].astype(np.float32)} for x in np.random.default_rng(0).normal(0, 1, (8, 64))]
    settings = lower(Config(get_default_config("XINT8"))) if legacy else xint8()
    written = to_proto(quantize(load(model), settings, Reader(feeds)))
    (node,) = (node for node in written.graph.node if node.op_type == "DequantizeLinear" and "factor" in node.input[0])
    code, scale, zero = (numpy_helper.to_array(i).astype(np.float64) for name in node.input
                         for i in written.graph.initializer if i.name == name)  # fmt: skip
    assert abs((code - zero) * scale - value) <= abs(value) / 64


def test_rounds_are_bounded() -> None:
    model, data = small(lambda b: biased(b, 2.0**-24, 1.0)), feeds()
    quantize(load(model), xint8(), Reader(data))
    with pytest.raises(ConfigError, match="MaxLoopNum"):
        quantize(load(model), replace(xint8(), npu=replace(xint8().npu, rounds=0)), Reader(data))
    with pytest.raises(ConfigError, match="MaxLoopNum=0"):
        xint8(MaxLoopNum=0)


def test_layers_with_float_scales_of_their_own_are_left_alone() -> None:
    """As a layer in float: the limits hold among what has powers of two, and it keeps its scale and its bits."""
    for wide, kind in ((Int16Spec(), TensorProto.INT16), (Int8Spec(), TensorProto.INT8)):
        config = QConfig(
            QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()),
            layer_type_config={QLayerConfig(input_tensors=wide, weight=wide): ["Gemm"]},
        )
        model = load(cnn())
        quantize(model, lower(config), Reader(images()))
        proto = to_proto(model)
        constants = {i.name: i for i in proto.graph.initializer}
        found = set()
        for node in proto.graph.node:
            if node.op_type == "QuantizeLinear":
                scale = numpy_helper.to_array(constants[node.input[1]])
                found.add((constants[node.input[2]].data_type, bool(np.all(np.log2(scale) % 1 == 0))))
        assert found >= {(TensorProto.INT8, True), (kind, False)}
        (feed,) = images(1)
        assert sqnr(run(cnn(), feed), run(proto, feed)) > 37


# The DPU's operators -------------------------------------------------------------------------------------------------


def test_factors_of_means() -> None:
    """The table as documented; elsewhere the nearest k / 2^n, found here by trying every k."""
    documented = {3: 63 / 64, 5: 250 / 256, 6: 252 / 256, 7: 1029 / 1024, 14: 4116 / 4096}
    assert {size: mean_factor(size, size) for size in documented} == documented
    for sizes in [(2, 2), (4, 4), (1, 3), (3, 5), (8, 8), (10, 7), (13,)]:
        count = int(np.prod(sizes))
        tried = [k / 2**n for n in range(20) if 2**n < 128 * count for k in range(256)]
        best = min(tried, key=lambda value: abs(value - 1 / count))
        assert mean_factor(*sizes) == pytest.approx(best * count)
    assert mean_factor(2, 2) == mean_factor(8, 8) == 1


def pools(b: Builder) -> None:
    pooled = b.node("AveragePool", ["x"], "pooled", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    soft = b.node("LeakyRelu", [pooled], "leaky", alpha=0.3)
    gate = b.node("Sigmoid", [soft], "gate")
    b.node("ReduceMean", [gate], "mean", axes=[1], keepdims=1)
    b.node("HardSigmoid", ["mean"], "y", alpha=1 / 6)


def simulated(settings: Settings) -> onnx.ModelProto:
    model = load(small(pools, channels=3))
    simulate(model, settings)
    proto = to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def hard(x: Any) -> Any:
    return np.clip(x / 6 + 0.5, 0, 1)


def test_operators_compute_what_the_dpu_computes() -> None:
    (feed, _) = feeds(channels=3, low=-3, high=3)
    x = np.pad(feed["x"], ((0, 0), (0, 0), (1, 1), (1, 1))).astype(np.float64)
    weight = np.pad(np.ones((4, 4)), 1)
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3)).sum((-1, -2))
    pooled = windows / np.lib.stride_tricks.sliding_window_view(weight, (3, 3)).sum((-1, -2)) * 63 / 64
    leaky = np.where(pooled < 0, pooled * 77 / 256, pooled)
    gate = hard(leaky) * 2731 * 6 / 16384
    expected = hard(gate.mean(1, keepdims=True) * 3 * 85 / 256) * 2731 * 6 / 16384
    model = simulated(xint8())
    np.testing.assert_allclose(run(model, feed), expected, rtol=1e-5)
    assert [node.op_type for node in model.graph.node].count("Mul") == 4


EFFECT = {
    "ConvertLeakyReluToDPUVersion": lambda m: next(n for n in m.graph.node if n.op_type == "LeakyRelu").attribute[0].f,
    "ConvertSigmoidToHardSigmoid": lambda m: sum(n.op_type == "Sigmoid" for n in m.graph.node),
    "ConvertHardSigmoidToDPUVersion": lambda m: sum(n.name == "y_node_Mul" for n in m.graph.node),
    "ConvertAvgPoolToDPUVersion": lambda m: sum(n.name == "pooled_node_Mul" for n in m.graph.node),
    "ConvertReduceMeanToDPUVersion": lambda m: sum(n.name == "mean_node_Mul" for n in m.graph.node),
}


@pytest.mark.parametrize("option", EFFECT)
def test_each_conversion_has_its_option(option: str) -> None:
    option_on = EFFECT[option](simulated(xint8(**{option: True, "SimulateDPU": False})))
    option_off = EFFECT[option](simulated(xint8(**{option: False})))
    assert option_on != option_off
    assert lower(QConfig(QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()),
                         SimulateDPU=False)).npu.conversions == ()  # fmt: skip
    assert set(xint8().npu.conversions) == {*CONVERSIONS} - {"Clip", "Softmax", "InstanceNorm"}
    assert xint8(EnableNPUCnn=False).npu.conversions == ()
    floats = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
    assert lower(QConfig(floats, EnableNPUCnn=True)).npu.conversions == ()


def bfloat16(x: Any) -> Any:
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


ON_REQUEST = {
    "ConvertClipToDPUVersion": True,
    "ConvertSoftmaxToDPUVersion": True,
    "ConvertInstanceNormToDPUVersion": True,
}


def in_bfloat16(b: Builder) -> None:
    scale, bias = (b.constant(name, b.random.normal(0, 1, 4)) for name in ("gain", "shift"))
    b.node("InstanceNormalization", ["x", scale, bias], "normed", epsilon=1e-3)
    b.node("Softmax", ["normed"], "share", axis=1)
    b.node("Mul", ["share", b.constant("seven", np.array(7.0))], "spread")
    b.node("Clip", ["spread", b.constant("low", np.array(0.7))], "y")


def dpu_instance_norm(x: Any, scale: Any, bias: Any) -> Any:
    u = bfloat16(x)
    mean = u.mean((2, 3), keepdims=True)
    variance = np.float32(np.mean(np.float64(u) ** 2, (2, 3), keepdims=True) - np.float64(mean) ** 2)
    s = bfloat16(1 / np.sqrt(variance + np.float32(1e-3)))
    t = bfloat16(bfloat16(s * u) - bfloat16(s * bfloat16(mean)))
    return bfloat16(bfloat16(scale)[:, None, None] * t + bfloat16(bias)[:, None, None])


def dpu_softmax(x: Any) -> Any:
    u = bfloat16(x)
    k = np.floor(bfloat16(u * np.float32(1.4453125)))
    f = bfloat16(u - bfloat16(k * np.float32(0.69140625)))
    inner = bfloat16(np.float32(0.486328125) + np.float32(0.21875) * f)
    e = bfloat16(bfloat16(2.0**k) * bfloat16(1 + f * bfloat16(1 + f * inner)))
    return bfloat16(e / bfloat16(e.sum(1, keepdims=True)))


def test_norms_and_softmax_in_bfloat16_and_whole_bounds() -> None:
    """The formulas of onnx_ops/dpu.py with ml_dtypes. The means sum in another order: a step of bfloat16 at most."""
    (feed, _) = feeds(channels=4, low=-3, high=3)
    source = small(in_bfloat16, channels=4)
    stored = {i.name: numpy_helper.to_array(i) for i in source.graph.initializer}
    for name in ("normed", "share"):
        source.graph.output.append(onnx.helper.make_tensor_value_info(name, 1, None))
    model = load(source)
    simulate(model, xint8(**ON_REQUEST))
    clipped, normed, share = outputs(to_proto(model), feed)
    expected = dpu_instance_norm(feed["x"], stored["gain"], stored["shift"])
    np.testing.assert_allclose(normed, expected, rtol=2**-7, atol=2**-9)
    np.testing.assert_array_equal(share, dpu_softmax(normed))
    np.testing.assert_array_equal(clipped, np.clip(share * 7, 1, 127))
    assert np.abs(share - np.exp(normed) / np.exp(normed).sum(1, keepdims=True)).max() < 2**-6


def test_simulated_operators_are_quantized_like_those_that_they_stand_for() -> None:
    source = small(in_bfloat16, channels=4)
    written = [
        to_proto(quantize(load(source), xint8(**options, ConvertOpsetVersion=17), Reader(feeds(channels=4))))
        for options in ({}, ON_REQUEST)
    ]
    plain, dpu = ([node.op_type.removeprefix("Extended") for node in model.graph.node] for model in written)
    assert plain == dpu and plain.count("QuantizeLinear") == 5
    assert [len(model.functions) for model in written] == [0, 2]
    (feed, _) = feeds(channels=4)
    assert np.isfinite(run(written[1], feed)).all()
    kept = xint8(**ON_REQUEST, OpTypesToQuantize=["Softmax"])
    only = to_proto(quantize(load(source), kept, Reader(feeds(channels=4))))
    assert {node.op_type for node in only.graph.node} >= {"ExtendedSoftmax", "InstanceNormalization"}


def test_a_factor_is_part_of_its_operator() -> None:
    """Nothing is quantized between a pool and its factor, and the factor stays float."""
    model = load(small(lambda b: b.node("AveragePool", ["x"], "y", kernel_shape=[3, 3])))  # type: ignore[arg-type,return-value]
    written = to_proto(quantize(model, xint8(), Reader(feeds())))
    assert [n.op_type for n in written.graph.node] == [
        "QuantizeLinear", "DequantizeLinear", "AveragePool", "Mul", "QuantizeLinear", "DequantizeLinear"
    ]  # fmt: skip
    assert {i.name: numpy_helper.to_array(i).item() for i in written.graph.initializer}["y_Factor"] == 63 / 64
    assert written.graph.output[0].name == "y"
    scales = {n.input[1] for n in written.graph.node if n.op_type == "QuantizeLinear"}
    values = {numpy_helper.to_array(i).item() for i in written.graph.initializer if i.name in scales}
    assert len(values) == 1  # AlignPool: one position on both sides


def test_operators_that_stay_in_float_are_not_simulated() -> None:
    model = load(small(pools, channels=3))
    before = to_proto(model).SerializeToString()
    settings = replace(xint8(), specs=replace(xint8().specs, exclude=("re:.*_node",)))
    assert simulate(model, settings) == 0
    assert [n.op_type for n in to_proto(model).graph.node] == [
        n.op_type for n in onnx.load_from_string(before).graph.node
    ]
    only = replace(xint8(), specs=replace(xint8().specs, op_types=("AveragePool",)))
    model = load(small(pools, channels=3))
    assert simulate(model, only) == 1
    assert {n.op_type for n in place(model, only).nodes} == {"AveragePool", "Mul"}


def test_saved_statistics_are_not_mixed_with_those_of_simulated_operators(tmp_path: Path) -> None:
    file = str(tmp_path / "statistics.npz")
    plain, simulated_too = xint8(SimulateDPU=False), xint8()
    quantize(load(mlp()), replace(plain, calibration=replace(plain.calibration, statistics=file)), Reader(vectors()))
    assert plain.npu.conversions == () != simulated_too.npu.conversions
    with pytest.raises(CalibrationError, match="another float model"):
        quantize(
            load(mlp()),
            replace(simulated_too, calibration=replace(simulated_too.calibration, statistics=file)),
            Reader(vectors()),
        )


def test_asymmetric_zero_points_follow_a_moved_scale() -> None:
    asymmetric = spec("uint8", symmetric=False)
    params = QParams(np.float32(0.25), np.float32(64))
    coarser = rescaled(params, asymmetric, np.array(0.5))
    # The smallest value, -16, stays the smallest code.
    assert (coarser.scale, coarser.zero_point) == (0.5, 32)
    assert rescaled(params, spec("uint8"), np.array(0.5)).zero_point == 64
    assert rescaled(params, asymmetric, np.array(0.25)) is params


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("legacy", [True, False])
def test_vint8_models_are_valid_and_run(legacy: bool, model: str) -> None:
    """Every tensor between nodes has its own pair of power-of-two scales; no activation is fused, no position moved."""
    make, read = MODELS[model]
    config = Config(get_default_config("VINT8")) if legacy else presets.VINT8_QCONFIG
    settings = lower(config)
    assert settings.qdq.dedicated_pairs and not settings.qdq.fused and not settings.npu.rules
    written = to_proto(quantize(load(make()), settings, Reader(read())))
    onnx.checker.check_model(written, full_check=True)
    file = File(written)
    for node in written.graph.node:
        if node.op_type == "QuantizeLinear":
            file.position(node)
        if node.op_type in ("Relu", "Gemm", "MatMul"):
            assert file.producer[node.input[0]].op_type == "DequantizeLinear"
    (feed, *_) = read()
    assert sqnr(run(make(), feed), run(written, feed)) > 20


def averaging() -> onnx.ModelProto:
    """Two averages over axes whose sizes the model leaves open."""
    b = Builder()
    b.node(
        "ReduceMean", [b.node("Conv", ["x", b.constant("w", b.random.normal(size=(4, 3, 1, 1)))], "h")], "m", axes=[2]
    )
    b.node("GlobalAveragePool", ["h"], "p")
    b.node("Flatten", ["p"], "y")
    return b.model({"x": ["n", 3, "h", "w"]}, {"y": ["n", 4], "m": ["n", 4, 1, "w"]})


def test_samples_say_how_many_values_are_averaged() -> None:
    """The same file as where the shapes are fixed, up to the shapes."""
    feeds = [{"x": np.random.default_rng(seed).normal(size=(2, 3, 7, 5)).astype(np.float32)} for seed in range(4)]
    opened = to_proto(quantize(load(averaging()), xint8(), Reader(feeds)))
    fixed = to_proto(quantize(load(averaging()), xint8(FixShapes="x:[2,3,7,5]"), Reader(feeds)))
    assert np.array_equal(run(opened, feeds[0]), run(fixed, feeds[0]))
    assert opened.graph.input[0].type.tensor_type.shape.dim[2].dim_param == "h"


def test_samples_of_several_sizes_do_not() -> None:
    feeds = [{"x": np.ones((1, 3, size, 5), np.float32)} for size in (7, 8)]
    with pytest.raises(
        ConfigError, match=r"m_node .* a row is \[3, 7, 5\] in the first sample and \[3, 8, 5\] in sample 1"
    ):
        quantize(load(averaging()), xint8(), Reader(feeds))
