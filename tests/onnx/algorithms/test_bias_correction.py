"""Bias correction: by the formula, in the order of the graph; it helps where there is a mean error, and never hurts."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
import pytest
from onnx import numpy_helper

from quark.core.metrics import sqnr
from quark.core.spec import LayerSpec, spec
from quark.errors import CalibrationError, ConfigError
from quark.onnx import (
    BiasCorrectionConfig,
    CalibMethod,
    CLEConfig,
    Int4Spec,
    Int8Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    UInt8Spec,
)
from quark.onnx.algorithms.rescaling import bias_correction, cle
from quark.onnx.config.config import Config
from quark.onnx.config.presets import get_default_config
from quark.onnx.config.settings import Settings, SpecSettings
from quark.onnx.flow import flow
from quark.onnx.graph.model_file import infer_shapes, load, to_proto
from quark.onnx.passes import PASSES
from tests.models.onnx_zoo import Builder, Reader, cnn, images, mlp, outputs, run, vectors

Array = np.ndarray[Any, Any]
DIGITS = Path(__file__).parents[3] / "examples" / "models" / "digits_cnn"
LAYER = QLayerConfig(input_tensors=UInt8Spec(calibration_method=CalibMethod.MinMax), weight=Int8Spec())
FOUR = QLayerConfig(input_tensors=UInt8Spec(), weight=Int4Spec(quant_granularity=QuantGranularity.Channel))
CORRECTION = BiasCorrectionConfig()


def quantized(model: onnx.ModelProto, feeds: Any, config: Any, *algorithms: Any) -> onnx.ModelProto:
    done = ModelQuantizer(config).quantize_model(model, None, Reader(feeds), algorithms=algorithms)
    assert done is not None
    onnx.checker.check_model(done)
    return done


def gain(model: onnx.ModelProto, feeds: Any, held: Any, config: Any) -> float:
    """What correction adds to the output SQNR, in dB."""
    expected = run(model, held)
    plain, corrected = (run(quantized(model, feeds, config, *more), held, False) for more in ((), (CORRECTION,)))
    return sqnr(expected, corrected) - sqnr(expected, plain)


def digits(name: str, count: int) -> list[dict[str, Array]]:
    pixels = np.load(DIGITS / "data.npz")[f"{name}_images"][:count]
    return [{"image": np.float32(pixels / 16).reshape(-1, 1, 1, 8, 8)[i]} for i in range(len(pixels))]


def badly_scaled(monkeypatch: pytest.MonkeyPatch, seed: int) -> onnx.ModelProto:
    """The classifier with channels rescaled by up to 100: cross-layer equalization, with other scales than its own."""
    random, model = np.random.default_rng(seed), load(str(DIGITS / "model.onnx"))
    infer_shapes(model)
    PASSES["fold_batch_norm"](model)
    with monkeypatch.context() as context:
        context.setattr(cle, "equalizing_scale", lambda ranges, *_: 10.0 ** random.uniform(-1, 1, len(ranges)))
        assert cle.equalize(model, CLEConfig(), Settings(SpecSettings(LayerSpec(weight=spec("int8"))))) > 2
    return to_proto(model)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_badly_scaled_channels_gain(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"image": np.concatenate([feed["image"] for feed in digits("heldout", 300)])}
    assert gain(badly_scaled(monkeypatch, seed), digits("calibration", 32), held, QConfig(LAYER)) > 1


CONFIGS: dict[str, Any] = {
    "A8W8 per channel": QConfig(
        QLayerConfig(input_tensors=LAYER.input_tensors, weight=Int8Spec(quant_granularity=QuantGranularity.Channel))
    ),
    "int8 bias": QConfig(LAYER, Int32Bias=False),
    "int16 bias": QConfig(LAYER, Int16Bias=True),
    "float bias": QConfig(LAYER, QuantizeBias=False),
    "ort_x64": QConfig(LAYER, Target="ort_x64"),
    "weights alone": QConfig(FOUR, WeightsOnly=True),
    **{name: Config(get_default_config(name)) for name in ("XINT8", "A16W8", "BF16", "BFP16")},
}
for _name in ("XINT8", "A16W8"):
    # They correct by themselves, which is to be seen apart.
    CONFIGS[_name].global_quant_config.extra_options["BiasCorrection"] = False


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 8])
def test_what_weights_alone_get_wrong_needs_few_examples(count: int) -> None:
    held = {"image": np.concatenate([feed["image"] for feed in digits("heldout", 300)])}
    data = digits("calibration", count)
    assert gain(onnx.load(DIGITS / "model.onnx"), data, held, Config(get_default_config("INT8_CPU_WEIGHTS"))) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_it_never_hurts(name: str) -> None:
    held = {"image": np.concatenate([feed["image"] for feed in digits("heldout", 300)])}
    found = [
        gain(onnx.load(DIGITS / "model.onnx"), digits("calibration", count), held, CONFIGS[name]) for count in (16, 64)
    ]
    found.append(gain(cnn(), images(), images(1, 9)[0], CONFIGS[name]))
    found.append(gain(mlp(), vectors(2), vectors(1, 9)[0], CONFIGS[name]))
    assert min(found) > -0.1 and found[1] > 0.3 and found[2] > 0.2


def named(name: str, count: int, **options: Any) -> onnx.ModelProto:
    """The classifier by a preset, calibrated with so many samples."""
    config = get_default_config(name)
    config.extra_options.update(options)
    return quantized(onnx.load(DIGITS / "model.onnx"), digits("calibration", count), Config(config))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["XINT8", "A8W8", "U8S8_AAWS"])
def test_one_scale_a_weight_is_corrected_by_itself_where_there_are_samples_enough(name: str) -> None:
    assert named(name, 8) == named(name, 8, BiasCorrection=True) != named(name, 8, BiasCorrection=False)
    assert named(name, 7) == named(name, 7, BiasCorrection=False)


@pytest.mark.slow
def test_too_few_samples_are_refused_before_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark.onnx.flow.flow.decide", None)
    with pytest.raises(CalibrationError, match="at least 8 examples to tell errors from noise, got 7"):
        named("A8W8", 7, BiasCorrection=True)
    with pytest.raises(CalibrationError, match="got 4"):
        quantized(cnn(), images(1), QConfig(LAYER), CORRECTION)


def chain(bias: bool, beta: float = 1.0) -> onnx.ModelProto:
    """ConvTranspose in two groups, Conv, mean, Gemm, MatMul and an Add; the first three with or without a bias."""
    b = Builder()

    def more(name: str, size: int) -> list[str]:
        return [b.constant(f"{name}_b", b.random.normal(1, 1, size))] if bias else []

    x = b.node(
        "ConvTranspose", ["x", b.constant("a", b.random.normal(0, 1, (4, 3, 2, 2))), *more("a", 6)], "up", group=2
    )
    x = b.node("Conv", [x, b.constant("c", b.random.normal(0, 1, (8, 6, 3, 3))), *more("c", 8)], "conv")
    x = b.node("Flatten", [b.node("GlobalAveragePool", [b.node("Relu", [x], "relu")], "mean")], "flat")
    x = b.node("Gemm", [x, b.constant("g", b.random.normal(0, 1, (5, 8))), *more("g", 5)], "gemm", transB=1, beta=beta)
    x = b.node("MatMul", [x, b.constant("m", b.random.normal(0, 1, (5, 3)))], "product")
    b.node("Add", [b.constant("m_b", b.random.normal(0, 1, 3)), x], "y")
    return b.model({"x": ["n", 4, 6, 6]}, {"y": ["n", 3]})


def feeds(count: int, seed: int = 0) -> list[dict[str, Array]]:
    random = np.random.default_rng(seed)
    return [{"x": np.float32(random.normal(1, 1, (8, 4, 6, 6)))} for _ in range(count)]


def tapped(model: onnx.ModelProto, name: str, data: list[Any]) -> Array:
    """A tensor for all samples."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    del model.graph.output[:]
    model.graph.output.append(onnx.ValueInfoProto(name=name))
    return np.concatenate([outputs(model, sample)[0] for sample in data])


def certain(differences: Array) -> Array:
    """The formula, in the standard library's terms."""
    found = []
    for values in np.float64(differences).T.tolist():
        mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
        found.append(mean * max(0.0, 1 - 4 * (error / mean) ** 2))
    return np.array(found)


@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_bias_moves_by_the_mean_error_behind_the_corrected_layers(bias: bool) -> None:
    """By hand: layer after layer, the error that is left, from runs of the whole files."""
    model, data = chain(bias, beta=0.5), feeds(3)
    config = QConfig(FOUR, WeightsOnly=True)
    work = quantized(model, data, config)
    done = quantized(model, data, config, CORRECTION)
    stored = {tensor.name: tensor for tensor in done.graph.initializer}
    by_output = {node.output[0]: node for node in done.graph.node}
    for layer, place in (("up", 2), ("conv", 2), ("gemm", 2), ("product", None)):
        node = by_output["y"] if place is None else by_output[layer]
        name = node.input[0 if place is None else place]
        found = numpy_helper.to_array(stored[name])
        before = (
            numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name))
            if bias or place is None
            else 0 * found
        )
        difference = np.float64(tapped(model, layer, data)) - tapped(work, layer, data)
        means = difference.reshape(*difference.shape[:2], -1).mean(2)
        expected = certain(means)
        factor = 0.5 if layer == "gemm" else 1.0
        np.testing.assert_allclose(found, before + expected / factor, atol=1e-4)
        assert np.any(np.abs(expected) > 0.01)
        # The layers that follow are corrected behind this one.
        (mine,) = [n for n in work.graph.node if n.output[0] == node.output[0]]
        if len(mine.input) > (place or 0):
            mine.input[place or 0] = name
        else:
            mine.input.append(name)
        for tensor in [t for t in work.graph.initializer if t.name == name]:
            work.graph.initializer.remove(tensor)
        work.graph.initializer.append(stored[name])


def test_a_bias_on_a_grid_of_its_own_comes_as_near_as_the_grid_lets_it() -> None:
    """What rounding the bias adds is not an error that the bias makes up for: that would move it by two steps."""
    b, data = Builder(), feeds(4)
    bias = b.random.normal(0, 9, 8).astype(np.float32)
    b.node("Conv", ["x", b.constant("c", b.random.normal(0, 1, (8, 4, 3, 3))), b.constant("c_b", bias)], "y")
    model = b.model({"x": ["n", 4, 6, 6]}, {"y": ["n", 8, 4, 4]})
    config = QConfig(LAYER, Int32Bias=False)
    plain, done = quantized(model, data, config), quantized(model, data, config, CORRECTION)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in plain.graph.initializer}
    scale = float(stored["c_b_scale"])
    rounding = scale * stored["c_b_quantized"] - bias
    differences = tapped(model, "y", data) - tapped(plain, "y_QuantizeLinear_Input", data)
    expected = np.rint((bias + certain(differences.mean((2, 3)) + rounding)) / scale)
    found = next(t for t in done.graph.initializer if t.name == "c_b_quantized")
    assert np.array_equal(numpy_helper.to_array(found), np.clip(expected, -127, 127))
    assert not np.array_equal(numpy_helper.to_array(found), stored["c_b_quantized"])


@pytest.mark.slow
def test_only_layers_that_are_quantized_get_a_bias() -> None:
    def biases(config: QConfig) -> int:
        done = quantized(chain(False), feeds(2), config, CORRECTION)
        return sum(
            len(node.input) == 3 for node in done.graph.node if node.op_type in ("Conv", "ConvTranspose", "Gemm")
        )

    assert biases(QConfig(LAYER)) == 3
    assert biases(QConfig(LAYER, exclude=["conv_node"])) == 2
    # A bias of zeros has no other values on its own grid.
    assert biases(QConfig(LAYER, Int32Bias=False)) == 0


def test_a_shared_bias_stays_as_it_is() -> None:
    b = Builder()
    weights = [b.constant(name, b.random.normal(0, 1, (4, 4))) for name in "vw"]
    bias = b.constant("b", b.random.normal(0, 1, 4))
    hidden = b.node("Add", [b.node("MatMul", ["x", weights[0]], "p"), bias], "hidden")
    b.node("Add", [b.node("MatMul", [hidden, weights[1]], "q"), bias], "y")
    model = b.model({"x": ["n", 4]}, {"y": ["n", 4]})
    data = [{"x": np.float32(b.random.normal(1, 1, (16, 4)))}]
    with pytest.raises(ConfigError, match="BiasCorrectionConfig: nothing in this model qualifies"):
        quantized(model, data, QConfig(LAYER, AllowNoop=False), CORRECTION)


def test_too_little_data_is_refused() -> None:
    three = [{name: array[:3] for name, array in feeds(1)[0].items()}]
    alone = QConfig(FOUR, WeightsOnly=True)
    for config, data, message in (
        (alone, feeds(1)[:0], "no sample"),
        (alone, three, "at least 4 .*got 3"),
        (QConfig(LAYER), three, "at least 8 .*got 3"),
    ):
        with pytest.raises(CalibrationError, match=message):
            quantized(chain(True), data, config, CORRECTION)
    with pytest.raises(CalibrationError, match="BiasCorrectionConfig needs calibration data"):
        ModelQuantizer(QConfig(FOUR, WeightsOnly=True, BiasCorrection=True)).quantize_model(chain(True))


def test_a_sample_without_rows_says_nothing() -> None:
    config, data = QConfig(FOUR, WeightsOnly=True), feeds(2)
    empty = {"x": data[0]["x"][:0]}
    expected, found = (
        quantized(chain(True), samples, config, CORRECTION) for samples in (data, [data[0], empty, data[1]])
    )
    assert found.graph == expected.graph


def test_a_layer_that_reads_vectors_is_corrected() -> None:
    """Each sample is one example."""
    b = Builder()
    x = b.node("MatMul", ["x", b.constant("w", b.random.normal(0, 1, (8, 6)))], "product")
    b.node("Add", [x, b.constant("b", b.random.normal(0, 1, 6))], "y")
    model, config = b.model({"x": [8]}, {"y": [6]}), QConfig(FOUR, WeightsOnly=True)
    data = [{"x": np.float32(b.random.normal(1, 1, 8))} for _ in range(20)]
    work, done = quantized(model, data, config), quantized(model, data, config, CORRECTION)
    rows = [[np.float64(outputs(made, sample)[0]) for sample in data] for made in (model, work)]
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in done.graph.initializer}
    before = numpy_helper.to_array(b.initializers[1])
    np.testing.assert_allclose(stored["b"], before + certain(np.subtract(*rows)), atol=1e-5)
    assert np.ptp(stored["b"] - before) > 0.01


def test_calibration_is_asked_for_the_means_of_layers_with_a_bias_alone() -> None:
    settings = replace(ModelQuantizer(QConfig(LAYER)).settings, correct_biases=True)
    models = [load(chain(bias)) for bias in (True, False)]
    asked = [[node.outputs[0].name for node in bias_correction.wanted_means(model, settings)] for model in models]
    assert asked == [["up", "conv", "gemm", "product"], ["product"]]


@pytest.mark.parametrize("opset", [17, pytest.param(21, marks=pytest.mark.slow)])
def test_calibration_takes_the_means_that_a_run_of_the_float_model_gives(
    opset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data, config = onnx.version_converter.convert_version(chain(True), opset), feeds(3), QConfig(LAYER)
    with monkeypatch.context() as context:
        context.setattr(bias_correction, "SlicedSession", None)
        found = quantized(model, data, config, CORRECTION)
    monkeypatch.setattr(flow, "wanted_means", lambda *_: [])
    expected = quantized(model, data, config, CORRECTION)
    stored = [{t.name: numpy_helper.to_array(t) for t in made.graph.initializer} for made in (found, expected)]
    assert stored[0].keys() == stored[1].keys()
    for name, array in stored[0].items():
        # A step of an int32 bias is a millionth of it.
        np.testing.assert_allclose(np.float64(array), np.float64(stored[1][name]), rtol=1e-4, atol=16, err_msg=name)
