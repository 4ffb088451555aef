"""Weights that one scale serves badly get scales of channels where nothing judges outputs; stock ONNX Runtime says."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from quark.core.array import NumpyArray
from quark.core.metrics import sqnr
from quark.onnx import Config, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, get_default_config, quantize_dynamic
from quark.onnx.search.lost_outputs.verdict import LEAST
from tests.models.onnx_sessions import in_exact_kernels
from tests.models.onnx_zoo import Builder, run

CHANNELS = 4
CODES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)


def depthwise(sizes: NumpyArray) -> onnx.ModelProto:
    """A depthwise convolution whose channels have these sizes, then a factor that brings them to one size again."""
    b = Builder()
    by_channel = (-1, 1, 1, 1)
    w = b.constant("w", b.random.normal(0, 1, (CHANNELS, 1, 3, 3)) * sizes.reshape(by_channel))
    v = b.constant("v", b.random.normal(0, 1, (2, CHANNELS, 1, 1)) * np.geomspace(1, 1e-2, 2).reshape(by_channel))
    h = b.node("Conv", ["x", w], "h", group=CHANNELS, pads=[1, 1, 1, 1])
    even = b.node("Mul", [h, b.constant("factor", (1 / sizes).reshape(1, -1, 1, 1))], "even")
    return b.model({"x": [1, CHANNELS, 8, 8]}, {b.node("Conv", [even, v], "y"): [1, 2, 8, 8]})


UNEVEN, EVEN = depthwise(np.geomspace(1, 1e-4, CHANNELS)), depthwise(np.ones(CHANNELS))


def weights_only(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    made = ModelQuantizer(QConfig(QLayerConfig(weight=Int8Spec()), WeightsOnly=True, **options)).quantize_model(model)
    assert made is not None
    return made


def dynamic(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    made = quantize_dynamic(model, extra_options=options)
    assert made is not None
    return made


def preset(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    config = get_default_config("UINT8_DYNAMIC_QUANT")
    config.extra_options |= options
    made = ModelQuantizer(Config(config)).quantize_model(model)
    assert made is not None
    return made


def kept(model: onnx.ModelProto, made: onnx.ModelProto) -> float:
    feed = {"x": np.random.default_rng(1).normal(size=(1, CHANNELS, 8, 8)).astype(np.float32)}
    return sqnr(run(model, feed), run(made, feed))


def scales(model: onnx.ModelProto, name: str) -> tuple[int, ...]:
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return arrays[f"{name}_scale"].shape


@pytest.mark.parametrize("quantize", [weights_only, dynamic, preset])
def test_channels_of_different_size_survive_without_data(quantize: Any) -> None:
    """One scale for all loses the output: what the command line refuses where it has data."""
    # Folded into the weight, the factor would leave channels of one size.
    assert kept(UNEVEN, quantize(UNEVEN, RefineWeightScales=False, FoldBatchNorm=False)) < LEAST
    assert (
        kept(UNEVEN, quantize(UNEVEN, FoldBatchNorm=False)) > kept(EVEN, quantize(EVEN, RefineWeightScales=False)) - 3
    )


def test_one_scale_stays_where_it_serves() -> None:
    """A matrix of few values without outliers keeps 40 dB under one scale, so that the file is the smallest."""
    b = Builder()
    y = b.node("MatMul", ["x", b.constant("w", b.random.uniform(-1, 1, (64, 8)))], "y")
    model = b.model({"x": [1, 64]}, {y: [1, 8]})
    assert scales(weights_only(model), "w") == ()


@pytest.mark.parametrize("size", [1e-8, 1e-20])
@pytest.mark.parametrize("preset", ["INT8_CPU_WEIGHTS", "INT8_CPU_DYNAMIC"])
def test_a_weight_of_tiny_values_keeps_them(preset: str, size: float) -> None:
    """A scale of no less than 1.2e-7 would make all of them 0; what follows scales them up."""
    b = Builder()
    small = b.node("MatMul", ["x", b.constant("small", b.random.normal(0, size, (32, 32)))], "h")
    b.node("Mul", [small, b.constant("up", np.full(32, 1 / size))], "y")
    model = b.model({"x": ["n", 32]}, {"y": ["n", 32]})
    feed = {"x": b.random.normal(size=(64, 32)).astype(np.float32)}
    made = ModelQuantizer(preset).quantize_model(model)
    assert made is not None and sqnr(run(model, feed), run(made, feed)) > 30


def test_an_override_keeps_its_weight() -> None:
    """What is said of one tensor by name wins."""
    made = weights_only(UNEVEN, TensorQuantOverrides={"w": [{"scale": 0.25, "zero_point": 0}]})
    assert scales(made, "w") == ()
    assert scales(made, "v") == (2,)


def recurrent(op_type: str, sizes: NumpyArray, directions: int) -> onnx.ModelProto:
    """A recurrent layer whose hidden states are driven by rows of these sizes."""
    b, hidden, gates = Builder(), len(sizes), {"LSTM": 4, "GRU": 3, "RNN": 1}[op_type]
    rows = np.tile(sizes, gates)[:, None]
    w = b.constant("w", b.random.normal(0, 1, (directions, gates * hidden, 16)) * rows)
    r = b.constant("r", b.random.normal(0, 0.3, (directions, gates * hidden, hidden)))
    way = "bidirectional" if directions == 2 else "forward"
    y = b.node(op_type, ["x", w, r], "y", hidden_size=hidden, direction=way)
    return b.model({"x": [5, 1, 16]}, {y: [5, directions, 1, hidden]})


@pytest.mark.slow
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize(
    ("op_type", "quantize"),
    [("LSTM", weights_only), ("GRU", weights_only), ("RNN", weights_only), ("LSTM", dynamic)],
)
def test_gates_of_different_size_keep_their_states(op_type: str, directions: int, quantize: Any) -> None:
    """In the integer kernel of an LSTM, too."""
    model = recurrent(op_type, np.geomspace(1, 1e-2, 8), directions)
    feed = {"x": np.random.default_rng(1).normal(size=(5, 1, 16)).astype(np.float32)}
    made = (in_exact_kernels(quantize(model, RefineWeightScales=on)) for on in (False, True))
    coarse, fine = (sqnr(run(model, feed), run(each, feed)) for each in made)
    assert fine > 35 and fine > coarse + 6


@pytest.mark.parametrize("quantize", [weights_only, dynamic])
def test_rows_of_different_size_are_told_apart_after_a_normalization(quantize: Any) -> None:
    """Both Gathers read one table of codes."""
    b, size = Builder(), 32
    table = b.constant("table", b.random.normal(0, 1, (64, size)) * np.geomspace(1, 1e-3, 64)[:, None])
    rows = b.node("Cast", ["x"], "rows", to=onnx.TensorProto.INT64)
    b.node("Sub", [b.integers("last", 63), rows], "back")
    one, other = (b.node("Gather", [table, rows], f"{rows}_picked") for rows in ("rows", "back"))
    both = b.node("Concat", [one, other], "both", axis=0)
    gain = [b.constant("gain", np.ones(size)), b.constant("shift", np.zeros(size))]
    y = b.node("LayerNormalization", [both, *gain], "y", epsilon=1e-12)
    model, feed = b.model({"x": [64]}, {y: [128, size]}), {"x": np.arange(64, dtype=np.float32)}
    made = quantize(model)
    assert sqnr(run(model, feed), run(quantize(model, RefineWeightScales=False), feed)) < LEAST
    assert sqnr(run(model, feed), run(made, feed)) > 40
    assert [
        tensor.dims for tensor in made.graph.initializer if len(tensor.dims) == 2 and tensor.data_type in CODES
    ] == [[64, size]]
