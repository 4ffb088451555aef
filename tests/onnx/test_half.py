"""Float16 models, quantized as they are: Q/DQ with float16 scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from quark.core.metrics import sqnr
from quark.errors import ConfigError, NotSupportedError
from quark.onnx import (
    BFloat16Spec,
    Config,
    Int8Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    SmoothQuantConfig,
    UInt8Spec,
    get_default_config,
)
from tests.models.onnx_zoo import Reader, cnn, half, images, run

CHANNEL = Int8Spec(quant_granularity=QuantGranularity.Channel)
LAYER = QLayerConfig(input_tensors=UInt8Spec(), weight=CHANNEL)


def half_cnn() -> onnx.ModelProto:
    """The zoo's CNN in float16: every float tensor of it."""
    model = cnn()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.checker.check_model(model, full_check=True)
    return model


def feeds() -> list[dict[str, Any]]:
    return [{"x": feed["x"].astype(np.float16)} for feed in images()]


def a8w8() -> Config:
    config = get_default_config("A8W8")
    config.extra_options = {**config.extra_options, "QuantizeFP16": True}
    return Config(config)


def xint8() -> Config:
    config = get_default_config("XINT8")
    config.extra_options = {**config.extra_options, "QuantizeFP16": True}
    return Config(config)


CONFIGS = {
    "u8s8": (lambda: QConfig(LAYER, QuantizeFP16=True), 28),
    "a8w8": (a8w8, 26),
    "xint8": (xint8, 22),
    "weights": (lambda: QConfig(LAYER, QuantizeFP16=True, WeightsOnly=True), 34),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_float16_model_runs_with_float16_scales(name: str) -> None:
    make, least = CONFIGS[name]
    done = ModelQuantizer(make()).quantize_model(half_cnn(), None, Reader(feeds()))
    assert done is not None
    onnx.checker.check_model(done, full_check=True)
    kinds = {i.name: i.data_type for i in done.graph.initializer}
    scales = [n.input[1] for n in done.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert scales and {kinds[scale] for scale in scales} == {TensorProto.FLOAT16}
    assert {n.domain for n in done.graph.node} == {""} and done.opset_import[0].version == 21
    (feed,) = feeds()[:1]
    found = run(done, feed)
    assert found.dtype == np.float16
    assert sqnr(run(half_cnn(), feed).astype(np.float32), found.astype(np.float32)) > least


def test_codes_are_those_of_the_rounded_scale() -> None:
    """What is stored decodes, under the float16 scale that is stored, to the nearest multiple of it."""
    done = ModelQuantizer(QConfig(LAYER, QuantizeFP16=True)).quantize_model(half_cnn(), None, Reader(feeds()))
    assert done is not None
    stored = {i.name: numpy_helper.to_array(i) for i in done.graph.initializer}
    weight = next(numpy_helper.to_array(i) for i in half_cnn().graph.initializer if i.name == "fc_w").astype(np.float32)
    scale = stored["fc_w_scale"].astype(np.float32)
    error = np.abs(stored["fc_w_quantized"] * scale - weight)
    assert stored["fc_w_scale"].dtype == np.float16
    # float16 rounds a scale by up to 2^-11, which moves the largest code by up to 127 * 2^-11 steps.
    assert (error <= scale * (0.5 + 127 * 2**-11)).all()


def test_parts_in_float32_stay_float() -> None:
    layer = QLayerConfig(input_tensors=UInt8Spec(), weight=Int8Spec())
    random = np.random.default_rng(0)
    feed = {"x": random.normal(size=(64, 8)).astype(np.float16)}
    done = ModelQuantizer(QConfig(layer, QuantizeFP16=True)).quantize_model(half(), None, Reader([feed]))
    assert done is not None
    inputs = {n.input[0] for n in done.graph.node if n.op_type == "QuantizeLinear"}
    assert "x" in inputs and "up" not in inputs and "soft" not in inputs
    assert np.abs(run(done, feed).astype(np.float32) - run(half(), feed).astype(np.float32)).max() < 0.05


@pytest.mark.parametrize("saved", [False, True])
def test_masks_of_float16_stay_float(saved: bool, tmp_path: Path) -> None:
    """Also when the ranges come from a file of statistics."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 17]>
        g (float16[n, 8] x, float16[n, 8] mask) => (float16[n, 8] y)
        { scores = MatMul(x, w)  masked = Add(scores, mask)  y = Softmax(masked) }""")
    random = np.random.default_rng(0)
    model.graph.initializer.append(numpy_helper.from_array(random.normal(size=(8, 8)).astype(np.float16), "w"))
    feed = {"x": random.normal(size=(32, 8)).astype(np.float16), "mask": np.zeros((32, 8), np.float16)}
    feed["mask"][:, 6:] = -65504
    layer = QLayerConfig(input_tensors=UInt8Spec(), weight=Int8Spec())
    options = {"Statistics": str(tmp_path / "statistics.npz")} if saved else {}
    config = QConfig(layer, QuantizeFP16=True, **options)
    done = ModelQuantizer(config).quantize_model(model, None, Reader([feed]))
    assert done is not None
    assert not {"mask", "masked"} & {n.input[0] for n in done.graph.node if n.op_type == "QuantizeLinear"}
    assert np.abs(run(done, feed).astype(np.float32) - run(model, feed).astype(np.float32)).max() < 0.05


def test_what_has_no_float16_form_is_refused() -> None:
    fast = ModelQuantizer(QConfig(LAYER, QuantizeFP16=True, Target="ort_x64"))
    bfloat16 = QLayerConfig(input_tensors=BFloat16Spec(), weight=BFloat16Spec())
    with pytest.raises(ConfigError, match="no float16 input or weight"):
        ModelQuantizer(QConfig(LAYER, QuantizeFP16=True)).quantize_model(cnn(), None, Reader(images()))
    with pytest.raises(NotSupportedError, match=r"QuantizeFP16=True or ConvertFP16ToFP32=True"):
        ModelQuantizer(QConfig(LAYER)).quantize_model(half_cnn(), None, Reader(feeds()))
    with pytest.raises(ConfigError, match="ort_x64 computes in float32"):
        fast.quantize_model(half_cnn(), None, Reader(feeds()))
    with pytest.raises(NotSupportedError, match="static integers"):
        ModelQuantizer(QConfig(bfloat16, QuantizeFP16=True)).quantize_model(half_cnn(), None, Reader(feeds()))


def test_the_factors_of_smoothquant_are_float16() -> None:
    """One that no constant before the layer can take: it has the type of the tensor."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 17]>
        g (float16[n, 8] x) => (float16[n, 8] y) { y = MatMul(x, w) }""")
    random = np.random.default_rng(0)
    model.graph.initializer.append(numpy_helper.from_array(random.normal(size=(8, 8)).astype(np.float16), "w"))
    feed = {"x": (random.normal(size=(256, 8)) * [30, *[1] * 7]).astype(np.float16)}
    quality = []
    for algorithms in ([], [SmoothQuantConfig()]):
        done = ModelQuantizer(QConfig(LAYER, algo_config=algorithms, QuantizeFP16=True)).quantize_model(
            model, None, Reader([feed])
        )
        assert done is not None
        onnx.checker.check_model(done, full_check=True)
        assert len(algorithms) == sum(node.op_type == "Mul" for node in done.graph.node)
        quality.append(sqnr(run(model, feed).astype(np.float32), run(done, feed).astype(np.float32)))
    assert quality[1] > quality[0] + 3


@pytest.mark.parametrize(
    ("asked", "target"),
    [({"QuantizeFP16": True, "UseFP32Scale": True}, {}), ({}, {"Target": "ort_x64"}), ({}, {"Target": "ort_arm64"})],
    ids=["asked", "ort_x64", "ort_arm64"],
)
def test_float32_scales_between_float16_ends(asked: dict[str, Any], target: dict[str, Any]) -> None:
    """The integers are those of the model that ConvertFP16ToFP32 makes; inputs and outputs stay float16."""
    done = ModelQuantizer(QConfig(LAYER, **asked, **target)).quantize_model(half_cnn(), None, Reader(feeds()))
    same = [{"x": feed["x"].astype(np.float32)} for feed in feeds()]
    config = QConfig(LAYER, ConvertFP16ToFP32=True, **target)
    whole = ModelQuantizer(config).quantize_model(half_cnn(), None, Reader(same))
    assert done is not None and whole is not None
    onnx.checker.check_model(done, full_check=True)
    ends = [value.type.tensor_type.elem_type for value in (*done.graph.input, *done.graph.output)]
    assert set(ends) == {TensorProto.FLOAT16} and done.opset_import[0].version < 21
    assert TensorProto.FLOAT16 not in {i.data_type for i in done.graph.initializer}
    (feed,) = feeds()[:1]
    exact = run(whole, {"x": feed["x"].astype(np.float32)})
    np.testing.assert_array_equal(run(done, feed), exact.astype(np.float16))
    with pytest.raises(ConfigError, match="UseFP32Scale=True is for float16 models"):
        ModelQuantizer(QConfig(LAYER, UseFP32Scale=True))
