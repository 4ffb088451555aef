"""Layers whose channels were rescaled by intent are judged up to these scales; what rounding did is not hidden so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from quark.core.metrics import FEWEST, ChannelFit
from quark.onnx import CalibMethod, CLEConfig, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, UInt8Spec
from quark.onnx.evaluation.compare_models import Report, compare_models
from tests.models.onnx_zoo import Array, Reader, images
from tests.onnx.algorithms.test_cle import CHAIN, EVERYWHERE, badly_scaled, chain

LAYER = QLayerConfig(input_tensors=UInt8Spec(calibration_method=CalibMethod.MinMax), weight=Int8Spec())


def pairs(scale: Array, noise: float, bias: float = 0.0) -> list[tuple[Array, Array]]:
    """Three samples (n, channels, 5): a float tensor, and one with factors, errors and a bias."""
    random = np.random.default_rng(0)
    found = []
    for n in (2, 4, 3):
        x = random.normal(1, 1, (n, len(scale), 5))
        found.append((x, scale[:, None] * (x + random.normal(0, noise, x.shape)) + bias))
    return found


def test_the_fit_is_that_of_a_line_through_each_channel() -> None:
    scale = np.logspace(-2, 2, 6)
    fit, found = ChannelFit(1), pairs(scale, 0.1)
    for x, y in found:
        fit.update(x, y)
    x, y = (np.concatenate([pair[i] for pair in found]).transpose(1, 0, 2).reshape(6, -1) for i in (0, 1))
    slopes = np.array([np.polyfit(b, a, 1)[0] for a, b in zip(x, y, strict=True)])
    noise = np.sum((x - slopes[:, None] * y) ** 2) / np.sum(x**2)
    assert fit.count == 45 and fit.sqnr == pytest.approx(-10 * np.log10(noise * 45 / 43), abs=1e-6)
    assert 19 < fit.sqnr < 23.1


def test_a_bias_is_no_factor() -> None:
    fit, plain = ChannelFit(1), 0.0
    for x, y in pairs(np.ones(6), 0.0, bias=1.0):
        fit.update(x, y)
        plain += float(np.sum(x**2))
    assert fit.sqnr == pytest.approx(10 * np.log10(plain / (45 * 6)), abs=0.5)


def test_there_is_no_fit_to_few_values_or_other_channels() -> None:
    x = np.random.default_rng(0).normal(size=(FEWEST - 1, 4))
    assert ChannelFit(-1).update(x, 2 * x).sqnr == -np.inf
    assert ChannelFit(-1).update(x, 2 * x).update(x, 2 * x).sqnr > 100
    assert ChannelFit(-1).update(x, 2 * x).update(x[:, :3], x[:, :3]).update(x, 2 * x).sqnr == -np.inf


def report(folder: Path, model: onnx.ModelProto, *algorithms: Any) -> Report:
    onnx.save(model, folder / "float.onnx")
    quantizer = ModelQuantizer(QConfig(LAYER, algo_config=list(algorithms)))
    quantizer.quantize_model(model, folder / "quantized.onnx", Reader(images()))
    return compare_models(folder / "float.onnx", folder / "quantized.onnx", images(4, seed=2))


def test_equalized_layers_are_judged_up_to_their_scales(tmp_path: Path) -> None:
    """Their rows are as good as those of a model that was never out of scale."""
    bad = badly_scaled(chain(), CHAIN)
    equalized = {layer.tensor: layer for layer in report(tmp_path, bad, EVERYWHERE).layers}
    assert [name for name, layer in equalized.items() if not layer.rescaled] == ["y"]
    assert all(layer.sqnr > 25 for layer in equalized.values())
    assert equalized["r2"].damage.sqnr < 5 and equalized["r2"].sqnr > 30


@pytest.mark.parametrize("make", (chain, lambda: badly_scaled(chain(), CHAIN)))
def test_nothing_else_is_taken_for_a_scale(tmp_path: Path, make: Any) -> None:
    """Also where quantization breaks a layer: its errors are none of its channels' scales."""
    found = report(tmp_path, make())
    assert not [layer for layer in found.layers if layer.rescaled]
    assert all(layer.sqnr == layer.damage.sqnr for layer in found.layers)


@pytest.mark.slow
def test_a_wrong_weight_is_still_the_worst_layer(tmp_path: Path) -> None:
    """One weight of an equalized model is broken after quantization: its row, and no other before it, says so."""
    before = report(tmp_path, chain(), CLEConfig(cle_scale_use_threshold=False))
    model = onnx.load(tmp_path / "quantized.onnx")
    (codes,) = (tensor for tensor in model.graph.initializer if tensor.name == "three_w_quantized")
    broken = np.random.default_rng(0).permutation(numpy_helper.to_array(codes).ravel()).reshape(codes.dims)
    codes.CopyFrom(numpy_helper.from_array(broken, codes.name))
    onnx.save(model, tmp_path / "quantized.onnx")
    after = compare_models(tmp_path / "float.onnx", tmp_path / "quantized.onnx", images(4, seed=2))
    sqnrs = [{layer.tensor: layer.sqnr for layer in found.layers} for found in (before, after)]
    assert sqnrs[1]["r3"] < 5 < 25 < sqnrs[0]["r3"] and sqnrs[1]["r2"] == pytest.approx(sqnrs[0]["r2"])
