"""Int16Scale and UsePowerOf2Scale: which numbers the scales of a written model are."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from quark.core.metrics import sqnr
from quark.core.scales import nearest_fraction
from quark.onnx import Int8Spec, ModelQuantizer, QConfig, QLayerConfig, XInt8Spec
from quark.onnx.config.enums import CalibMethod, ScaleType
from tests.models.onnx_zoo import Builder, Reader, cnn, images, run


def quantized(model: onnx.ModelProto, spec: Any, **options: Any) -> onnx.ModelProto:
    layer = QLayerConfig(input_tensors=spec, weight=spec)
    done = ModelQuantizer(QConfig(layer, **options)).quantize_model(model, None, Reader(images()))
    assert done is not None
    return done


def scales(model: onnx.ModelProto) -> np.ndarray:
    """Scales of activations and weights; that of an int32 bias is the product of two."""
    stored = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    names = {n.input[1] for n in model.graph.node if n.op_type.endswith("QuantizeLinear")}
    kept = [stored[name] for name in names if "_quantized_scale" not in name]
    return np.concatenate([np.ravel(scale) for scale in kept])


def is_power(scale: np.ndarray) -> np.ndarray:
    return np.frexp(scale)[0] == 0.5


def test_int16_scales_are_m_over_2_to_the_n() -> None:
    plain = Int8Spec(calibration_method=CalibMethod.MinMax)
    (feed,) = images(1)
    expected = run(cnn(), feed)
    by_option = quantized(cnn(), plain, Int16Scale=True)
    by_type = quantized(cnn(), Int8Spec(calibration_method=CalibMethod.MinMax, scale_type=ScaleType.Int16))
    assert by_option == by_type
    found = scales(by_option)
    np.testing.assert_array_equal(nearest_fraction(found), found)
    assert not is_power(found).all()
    np.testing.assert_array_equal(np.sort(found), np.sort(nearest_fraction(scales(quantized(cnn(), plain)))))
    # M has 14 bits from 1/4 on, and 9 where the scales of this model lie: far below the rounding of int8.
    assert sqnr(expected, run(by_option, feed)) > sqnr(expected, run(quantized(cnn(), plain), feed)) - 1


def test_a_bias_out_of_reach_enlarges_an_int16_scale_to_the_next() -> None:
    b = Builder()
    b.node("Gemm", ["x", b.constant("w", b.random.normal(0, 1e-3, (8, 8))), b.constant("b", np.full(8, 3e4))], "y")
    model = b.model({"x": ["n", 8]}, {"y": ["n", 8]})
    layer = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
    feed = {"x": np.float32(b.random.normal(0, 1e-3, (4, 8)))}
    done = ModelQuantizer(QConfig(layer, Int16Scale=True)).quantize_model(model, None, [feed])
    assert done is not None
    stored = {i.name: numpy_helper.to_array(i) for i in done.graph.initializer}
    assert nearest_fraction(stored["w_scale"]) == stored["w_scale"]
    bias = next(value for value in stored.values() if value.dtype == np.int32 and value.ndim)
    assert 0 < bias.max() < 2**31 - 1
    np.testing.assert_allclose(run(done, feed), run(model, feed), rtol=0.01)


@pytest.mark.parametrize("on", [True, False])
def test_powers_of_two_may_be_left_out(on: bool) -> None:
    found = scales(quantized(cnn(), XInt8Spec(), UsePowerOf2Scale=on))
    assert is_power(found).all() == on
