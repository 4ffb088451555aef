"""ConvertNCHWToNHWC: data of the model as it was given are moved with its inputs, and those that fit already stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark.core.metrics import sqnr
from quark.errors import CalibrationError
from quark.onnx.config.algo_configs import AdaRoundConfig
from quark.onnx.config.config import QConfig, QLayerConfig
from quark.onnx.config.enums import CalibMethod
from quark.onnx.config.tensor_specs import Int8Spec
from quark.onnx.quantizer import ModelQuantizer
from tests.models.onnx_zoo import Reader, cnn, images, run

INT8 = Int8Spec(calibration_method=CalibMethod.MinMax)
LAYER = QLayerConfig(input_tensors=INT8, weight=INT8)


def moved(feeds: list[Any]) -> list[Any]:
    return [{name: value.transpose(0, 2, 3, 1) for name, value in feed.items()} for feed in feeds]


def quantized(data: Any, convert: bool = True, **options: Any) -> tuple[onnx.ModelProto, ModelQuantizer]:
    quantizer = ModelQuantizer(QConfig(LAYER, ConvertNCHWToNHWC=convert, **options))
    model = quantizer.quantize_model(cnn(), None, data)
    assert model is not None
    return model, quantizer


def test_data_of_either_layout_make_one_model_and_are_compared_with() -> None:
    plain, _ = quantized(Reader(images()), convert=False)
    first, quantizer = quantized(Reader(images()), EvalMetrics=True, EvalDataReader=Reader(images(2, seed=5)))
    assert first.graph.input[0].type.tensor_type.shape.dim[3].dim_value == 3
    assert quantizer.metrics is not None and quantizer.damage is not None
    second, _ = quantized(Reader(moved(images())))
    assert first == second
    x = images()[0]
    assert sqnr(run(plain, x), run(first, moved([x])[0])) > 60


def test_an_array_a_folder_and_fine_tuning_take_them_too(tmp_path: Path) -> None:
    (name, _), *_ = images()[0].items()
    stacked = np.concatenate([feed[name] for feed in images()])
    np.savez(tmp_path / "data.npz", **{name: stacked})
    expected, _ = quantized(Reader(images()))
    assert quantized(stacked)[0] == expected
    quantizer = ModelQuantizer(QConfig(LAYER, ConvertNCHWToNHWC=True))
    assert quantizer.quantize_model(cnn(), None, None, str(tmp_path / "data.npz")) == expected
    tuned, _ = quantized(Reader(images(1)), algo_config=[AdaRoundConfig(num_iterations=2)])
    assert tuned.graph.input == expected.graph.input


def test_a_fixed_shape_is_that_of_the_model_as_it_was_given() -> None:
    (name, array), *_ = images()[0].items()
    model, _ = quantized(Reader(images(2)), FixShapes=f"{name}:{list(array.shape)}")
    sizes = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    assert sizes == list(moved(images())[0][name].shape)


def test_what_fits_neither_layout_is_an_error() -> None:
    (name, array), *_ = images()[0].items()
    with pytest.raises(CalibrationError, match=name):
        quantized([{name: array.transpose(0, 2, 1, 3)[:, :5]}])
