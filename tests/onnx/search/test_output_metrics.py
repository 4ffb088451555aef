"""EvalMetrics: cosine and L2 of the outputs, sample by sample, from their definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark.errors import CalibrationError
from quark.onnx import Int8Spec, ModelQuantizer, QConfig, QLayerConfig
from tests.models.onnx_zoo import Reader, cnn, images, outputs


def quantizer(**options: Any) -> ModelQuantizer:
    return ModelQuantizer(QConfig(QLayerConfig(Int8Spec(), weight=Int8Spec()), extra_options=options))


def assert_measured(metrics: Any, model: onnx.ModelProto | str, feeds: list[dict[str, Any]]) -> None:
    pairs = [(outputs(cnn(), feed)[0].ravel(), outputs(model, feed, optimise=True)[0].ravel()) for feed in feeds]
    cosines = [float(x @ y / np.linalg.norm(x) / np.linalg.norm(y)) for x, y in pairs]
    distances = [float(np.linalg.norm(x - y)) for x, y in pairs]
    assert metrics.samples == len(feeds)
    # Both run the same kernels in float32: 24 bits, of outputs far larger than their distance.
    assert (metrics.mean_cosine, metrics.min_cosine) == pytest.approx((np.mean(cosines), min(cosines)), abs=1e-5)
    assert (metrics.mean_l2, metrics.max_l2) == pytest.approx((np.mean(distances), max(distances)), rel=1e-3)
    assert metrics.min_cosine < metrics.mean_cosine < 1 and 0 < metrics.mean_l2 < metrics.max_l2


@pytest.mark.slow
def test_metrics_over_the_data_of_calibration_or_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "q.onnx"
    measured = quantizer(EvalMetrics=True)
    measured.quantize_model(cnn(), file, Reader(images()))
    assert_measured(measured.metrics, str(file), images())
    assert f"Quantized against float: {measured.metrics}." in capsys.readouterr().err
    measured = quantizer(EvalMetrics=True, EvalDataReader=Reader(images(3, seed=5)))
    model = measured.quantize_model(cnn(), None, Reader(images()))
    assert model == onnx.load(file)
    assert_measured(measured.metrics, model, images(3, seed=5))


def test_without_the_option_nothing_is_measured() -> None:
    plain = quantizer(EvalDataReader=Reader([]))
    plain.quantize_model(cnn(), None, Reader(images(1)))
    assert plain.metrics is None


def test_metrics_need_data(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="EvalMetrics=True needs data"):
        quantizer(EvalMetrics=True, WeightsOnly=True).quantize_model(cnn(), tmp_path / "q.onnx")
    with pytest.raises(CalibrationError, match="EvalMetrics=True needs data"):
        quantizer(EvalMetrics=True, EvalDataReader=Reader([])).quantize_model(cnn(), None, Reader(images(1)))
    assert not list(tmp_path.iterdir())
