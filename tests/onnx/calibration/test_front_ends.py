"""Front ends compute of inputs alone. They stay in float where codes would lose what they give, and only there."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from quark.core.metrics import sqnr
from quark.onnx import ModelQuantizer
from tests.models.onnx_zoo import Array, Builder, run

WINDOW, BINS = 64, 33


def sound_model(curve: str) -> onnx.ModelProto:
    """Sound x (n, 1, 1024) -> power of a DFT by convolution -> a curve, or none -> two layers -> y (n, 5)."""
    b = Builder()
    time, bins = np.arange(WINDOW), np.arange(BINS)[:, None]
    waves = [np.hanning(WINDOW) * wave(2 * np.pi * bins * time / WINDOW) for wave in (np.cos, np.sin)]
    parts = [
        b.node("Conv", ["x", b.constant(f"dft{i}", wave[:, None])], f"part{i}", strides=[32])
        for i, wave in enumerate(waves)
    ]
    power = b.node("Add", [b.node("Mul", [part, part], f"{part}_square") for part in parts], "power")
    if curve == "Log":
        power = b.node("Log", [b.node("Add", [power, b.constant("eps", np.array(1e-6))], "floor")], "curve")
    elif curve:
        power = b.node(curve, [power], "curve")
    hidden = b.node("Conv", [power, b.constant("w", b.random.normal(0, 0.1, (16, BINS, 3)))], "hidden")
    mean = b.node("ReduceMean", [b.node("Relu", [hidden], "relu")], "mean", axes=[2], keepdims=0)
    b.node("MatMul", [mean, b.constant("head", b.random.normal(0, 0.3, (16, 5)))], "y")
    return b.model({"x": ["n", 1, 1024]}, {"y": ["n", 5]})


def sounds(count: int = 8) -> list[dict[str, Array]]:
    """Tones of some loudnesses over a little noise."""
    random, time = np.random.default_rng(0), np.arange(1024) / 1024
    made = []
    for _ in range(count):
        pitch, loudness = random.uniform(40, 160, (4, 1)), 10 ** random.uniform(-2, 0, (4, 1))
        tones = loudness * np.sin(2 * np.pi * pitch * time) + 0.001 * random.normal(size=(4, 1024))
        made.append({"x": tones[:, None].astype(np.float32)})
    return made


def quantized(model: onnx.ModelProto, preset: str, feeds: Any) -> tuple[onnx.ModelProto, set[str]]:
    """And the tensors that have codes."""
    made = ModelQuantizer(preset).quantize_model(model, None, feeds)
    assert made is not None
    return made, {node.input[0] for node in made.graph.node if node.op_type == "QuantizeLinear"}


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "INT8_CPU", "A16W8"])
def test_a_spectrum_before_a_logarithm_stays_in_float(preset: str) -> None:
    model, feeds = sound_model("Log"), sounds()
    made, codes = quantized(model, preset, feeds)
    assert not codes & {"x", "part0", "part1", "power", "floor"} and "curve" in codes
    assert sqnr(run(model, feeds[-1]), run(made, feeds[-1])) > 25


def test_before_a_square_root_the_squares_do_and_without_a_curve_nothing_does() -> None:
    _, codes = quantized(sound_model("Sqrt"), "A8W8", sounds())
    assert {"x", "part0", "part1", "curve"} <= codes and not codes & {"power", "part0_square"}
    assert {"x", "part0", "part0_square", "power"} <= quantized(sound_model(""), "A8W8", sounds())[1]


@pytest.mark.parametrize("clip", [True, False])
def test_arithmetic_on_an_image_stays_in_float_where_it_takes_a_small_part_of_the_range(clip: bool) -> None:
    b = Builder()
    shifted = b.node("Sub", ["x", b.constant("level", np.array(1000.0 if clip else 0.0))], "shifted")
    scaled = b.node("Div", [shifted, b.constant("width", np.array(100.0 if clip else 2000.0))], "scaled")
    ends = [b.constant("low", np.array(-1.0)), b.constant("high", np.array(1.0 if clip else 40.0))]
    window = b.node("Clip", [scaled, *ends], "window")
    b.node("Conv", [window, b.constant("w", b.random.normal(0, 0.3, (4, 1, 3, 3)))], "y")
    model = b.model({"x": ["n", 1, 8, 8]}, {"y": ["n", 4, 6, 6]})
    random = np.random.default_rng(0)
    feeds = [{"x": (2000 * random.gamma(1.0, 1.0, (4, 1, 8, 8))).astype(np.float32)} for _ in range(4)]
    made, codes = quantized(model, "A8W8", feeds)
    assert ("x" in codes) is not clip and "window" in codes
    assert sqnr(run(model, feeds[0]), run(made, feeds[0])) > 25


def test_a_logarithm_of_few_orders_is_quantized_as_before() -> None:
    b = Builder()
    power = b.node("Abs", [b.node("Conv", ["x", b.constant("w", b.random.normal(0, 0.3, (4, 1, 3)))], "sum")], "abs")
    shifted = b.node("Add", [power, b.constant("one", np.array(1.0))], "shifted")
    log = b.node("Log", [shifted], "log")
    b.node("Conv", [log, b.constant("w2", b.random.normal(0, 0.3, (4, 4, 3)))], "y")
    model = b.model({"x": ["n", 1, 32]}, {"y": ["n", 4, 28]})
    feeds = [{"x": np.random.default_rng(i).normal(size=(4, 1, 32)).astype(np.float32)} for i in range(4)]
    assert {"x", "shifted"} <= quantized(model, "A8W8", feeds)[1]
