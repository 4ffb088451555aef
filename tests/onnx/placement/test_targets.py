"""Target profiles: what each runtime's row asks for is what stands in the file."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from quark.core.metrics import sqnr
from quark.errors import ConfigError
from quark.onnx.config.config import QConfig, QLayerConfig
from quark.onnx.config.enums import CalibMethod, QuantGranularity
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.tensor_specs import Int8Spec, QTensorConfig, UInt8Spec
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.search.settle import quantize
from tests.models.onnx_zoo import Builder, Reader, run

CHANNELS = Int8Spec(quant_granularity=QuantGranularity.Channel)


def gated() -> onnx.ModelProto:
    """A convolution, a Relu, a second one of bias and its SiLU, and a third."""
    b = Builder()
    h = b.node("Relu", [b.conv("x", "first", (8, 8, 3))], "positive")
    weight = b.constant("second_w", b.random.normal(0, 0.2, (8, 8, 1, 1)))
    h = b.node("Conv", [h, weight, b.constant("second_b", b.random.normal(0, 1, 8))], "signed", kernel_shape=[1, 1])
    h = b.node("Mul", [h, b.node("Sigmoid", [h], "gate")], "silu")
    b.conv(h, "third", (8, 8, 1), norm=False)
    return b.model({"x": ["n", 8, 5, 5]}, {"third_conv": ["n", 8, 5, 5]})


def samples() -> list[dict[str, Any]]:
    """Four batches."""
    return [{"x": np.random.default_rng(seed).normal(0, 1, (2, 8, 5, 5)).astype(np.float32)} for seed in range(4)]


def quantized(activation: QTensorConfig, target: str, **options: Any) -> onnx.ModelProto:
    """The model above for a target."""
    config = QConfig(QLayerConfig(input_tensors=activation, weight=CHANNELS), Target=target, **options)
    return to_proto(quantize(load(gated()), lower(config), Reader(samples())))


@pytest.mark.parametrize("method", [CalibMethod.MinMax, CalibMethod.Percentile, CalibMethod.Entropy])
def test_openvino_quantizes_what_linear_layers_read(method: CalibMethod) -> None:
    done = quantized(Int8Spec(calibration_method=method), "openvino")
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in done.graph.initializer}
    encoders = [node for node in done.graph.node if node.op_type == "QuantizeLinear"]
    assert [node.input[0] for node in encoders] == ["x", "positive", "silu"]
    # Of the three, only the output of the Relu is never negative.
    assert [str(constants[node.input[2]].dtype) for node in encoders] == ["int8", "uint8", "int8"]
    assert not any(constants[node.input[2]].any() for node in encoders)
    stored = [constants[node.input[0]] for node in done.graph.node if node.input[0] in constants]
    assert [w.min() >= -127 for w in stored if w.dtype == np.int8] == [True] * 3
    # 8 bits of one scale keep about 35 dB of a normal tensor; six roundings in a row lose 8 more at most.
    assert sqnr(run(gated(), samples()[0]), run(done, samples()[0])) > (27 if method is not CalibMethod.Entropy else 20)


def test_openvino_takes_the_maximum_of_a_positive_tensor_for_code_255() -> None:
    done = quantized(Int8Spec(calibration_method=CalibMethod.MinMax), "openvino")
    scales = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in done.graph.initializer}
    encoder = next(node for node in done.graph.node if node.input[0] == "positive")
    float_model = gated()
    float_model.graph.output.append(onnx.ValueInfoProto(name="positive"))
    peak = max(float(values.max()) for values in (_second(float_model, feed) for feed in samples()))
    assert float(scales[encoder.input[1]]) == pytest.approx(peak / 255, rel=1e-6)  # float32


def _second(model: onnx.ModelProto, feed: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The second output."""
    return np.asarray(onnxruntime.InferenceSession(model.SerializeToString()).run(["positive"], feed)[0])


@pytest.mark.parametrize(
    ("activation", "options", "message"),
    [
        (UInt8Spec(), {}, "'openvino' runs symmetric int8 activations .* the config has asymmetric uint8"),
        (Int8Spec(symmetric=False), {}, "the config has asymmetric int8"),
    ],
)
def test_openvino_refuses_what_it_computes_badly(
    activation: QTensorConfig, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        quantized(activation, "openvino", **options)


def test_arm_takes_both_types_where_x64_takes_one() -> None:
    asymmetric = Int8Spec(symmetric=False)
    assert len(quantized(asymmetric, "ort_arm64").graph.node) == len(quantized(UInt8Spec(), "ort_x64").graph.node)
    with pytest.raises(ConfigError, match="'ort_x64' runs uint8 activations in integers only; the config has int8"):
        quantized(asymmetric, "ort_x64")
