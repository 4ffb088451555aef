"""Options that say how a range is found: symmetric ranges, levels of the entropy, averages."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from quark.core.spec import spec
from quark.errors import ConfigError
from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, ScaleType, UInt8Spec, XInt8Spec
from quark.onnx.calibration.qparams import make_observer
from quark.onnx.config.lowering.lower import lower
from tests.models.onnx_zoo import Reader, cnn, images

pytestmark = pytest.mark.slow

LOW, HIGH = -1.0, 3.0


def feeds(count: int = 3) -> list[dict[str, Any]]:
    """Images in [-1, 3], both ends of which each holds."""
    found = images(count)
    for index, feed in enumerate(found):
        name = next(iter(feed))
        noise = np.random.default_rng(index).uniform(LOW, HIGH, feed[name].shape).astype(np.float32)
        noise.flat[:2] = LOW, HIGH
        feed[name] = noise
    return found


def quantized(method: CalibMethod, unsigned: bool = True, **options: Any) -> onnx.ModelProto:
    kind = (UInt8Spec if unsigned else Int8Spec)(calibration_method=method)
    config = QConfig(QLayerConfig(input_tensors=kind, weight=Int8Spec()), extra_options=options)
    model = ModelQuantizer(config).quantize_model(cnn(), None, Reader(feeds()))
    assert model is not None
    return model


def input_params(model: onnx.ModelProto) -> tuple[float, int]:
    """Scale and zero point of the model's input."""
    name = model.graph.input[0].name
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    node = next(node for node in model.graph.node if node.op_type == "QuantizeLinear" and node.input[0] == name)
    return float(constants[node.input[1]]), int(constants[node.input[2]])


def test_a_symmetric_range_of_min_max_has_its_zero_in_the_middle() -> None:
    """As ONNX Runtime's: the codes of uint8 lie evenly on both sides of 0, whatever the values are."""
    scale, zero = input_params(quantized(CalibMethod.MinMax))
    assert (scale, zero) == (pytest.approx((HIGH - LOW) / 255, rel=1e-6), round(255 / 4))
    for options in ({}, {"CalibMovingAverage": True}):
        scale, zero = input_params(quantized(CalibMethod.MinMax, CalibTensorRangeSymmetric=True, **options))
        assert (scale, zero) == (pytest.approx(2 * HIGH / 255, rel=1e-6), 128)
    assert input_params(quantized(CalibMethod.MinMax, CalibTensorRangeSymmetric=False))[1] == round(255 / 4)


@pytest.mark.parametrize("method", [CalibMethod.Percentile, CalibMethod.LayerwisePercentile])
def test_percentiles_cut_the_largest_magnitudes_or_both_ends(method: CalibMethod) -> None:
    """Against numpy's quantiles; a bin of the histogram is 2^-7 of its value wide."""
    x = np.concatenate([next(iter(feed.values())).reshape(-1) for feed in feeds()])
    share = {"Percentile": 90.0, "PercentileCandidates": [90.0]}
    largest = float(np.quantile(abs(x), 0.9))
    scale, _ = input_params(quantized(method, CalibTensorRangeSymmetric=True, **share))
    assert scale == pytest.approx((largest - LOW) / 255, rel=2**-7)
    low, high = np.quantile(x, [0.05, 0.95])
    scale, _ = input_params(quantized(method, CalibTensorRangeSymmetric=False, **share))
    assert scale == pytest.approx((high - low) / 255, rel=2**-6)
    scale, zero = input_params(quantized(method, unsigned=False, CalibTensorRangeSymmetric=False, **share))
    assert (scale, zero) == (pytest.approx(high / 127, rel=2**-7), 0)


def test_weights_keep_their_ranges() -> None:
    def scales(**options: Any) -> list[float]:
        graph = quantized(CalibMethod.MinMax, **options).graph
        weights = {node.input[1] for node in graph.node if node.op_type == "DequantizeLinear" and "weight" in node.name}
        return [float(numpy_helper.to_array(t).max()) for t in graph.initializer if t.name in weights]

    assert scales() == scales(CalibTensorRangeSymmetric=True)


def test_methods_without_a_choice_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    plain = input_params(quantized(CalibMethod.Entropy))
    assert input_params(quantized(CalibMethod.Entropy, CalibTensorRangeSymmetric=True)) == plain
    assert "CalibTensorRangeSymmetric has no effect on CalibMethod.Entropy" in capsys.readouterr().err
    kind = XInt8Spec(scale_type=ScaleType.PowerOf2)
    for symmetric in (None, True):
        config = QConfig(QLayerConfig(input_tensors=kind, weight=kind), CalibTensorRangeSymmetric=symmetric)
        ModelQuantizer(config)
    with pytest.raises(ConfigError, match="symmetric as its spec is"):
        ModelQuantizer(QConfig(QLayerConfig(input_tensors=kind, weight=kind), CalibTensorRangeSymmetric=False))


def test_fewer_levels_of_the_entropy_give_another_range() -> None:
    x = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    found = []
    for options in ({}, {"NumQuantizedBins": 128}, {"NumQuantizedBins": 16}):
        settings = lower(QConfig(QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()), **options))
        observer = make_observer(spec("int8", observer="entropy"), settings)
        observer.update(x)
        found.append(float(observer.range()[1]))
    by_type, same, fewer = found
    # With few levels it pays to cut the tail.
    assert by_type == same > 1.05 * fewer
    for wrong in (1, 4096):
        with pytest.raises(ConfigError, match=f"NumQuantizedBins={wrong}"):
            quantized(CalibMethod.Entropy, NumQuantizedBins=wrong)


def test_the_constant_of_the_average_changes_nothing() -> None:
    """As in ONNX Runtime, whose average over one run is arithmetic for every constant."""
    averages = {
        constant: input_params(quantized(CalibMethod.MinMax, CalibMovingAverage=True, **constant_of(constant)))
        for constant in (None, 0.01, 1.0)
    }
    assert len(set(averages.values())) == 1


def constant_of(value: float | None) -> dict[str, float]:
    return {} if value is None else {"CalibMovingAverageConstant": value}
