"""The default equalization: the better of two whole models is kept, and nothing is said where nothing qualifies."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from quark.core.metrics import sqnr
from quark.core.spec import LayerSpec
from quark.onnx import CLEConfig, ModelQuantizer
from quark.onnx.algorithms.quantized_layers import QuantizedLayers
from quark.onnx.calibration import calibrate
from quark.onnx.calibration.float_outputs import FloatOutputs
from quark.onnx.config.config import Config
from quark.onnx.config.presets import get_default_config
from quark.onnx.config.settings import Settings, SpecSettings
from quark.onnx.flow import flow
from quark.onnx.search import equalize_if_better as module
from tests.models.onnx_zoo import Reader, images, mlp, run, vectors
from tests.onnx.algorithms.test_cle import CHAIN, badly_scaled, chain, perceptron


def _config(include: bool = True, name: str = "XINT8", **options: Any) -> Config:
    config = get_default_config(name)
    config.include_cle = include
    config.extra_options.update(options)
    return Config(config)


def quantized(model: onnx.ModelProto, feeds: Any, include: bool, *algorithms: Any, **options: Any) -> onnx.ModelProto:
    before = model.SerializeToString()
    done = ModelQuantizer(_config(include, **options)).quantize_model(
        model, None, Reader(feeds), algorithms=list(algorithms)
    )
    assert done is not None and model.SerializeToString() == before
    return done


def worst(model: onnx.ModelProto, done: onnx.ModelProto, feeds: Any) -> float:
    expected, found = (np.concatenate([run(each, feed) for feed in feeds]) for each in (model, done))
    return sqnr(expected, found)


@pytest.mark.slow
def test_what_pays_is_kept_and_is_what_a_request_gives(caplog: pytest.LogCaptureFixture) -> None:
    model = badly_scaled(chain(), CHAIN)
    plain, better = (quantized(model, images(), include) for include in (False, True))
    asked = quantized(model, images(), True, CLEConfig(cle_steps=2))
    assert worst(model, better, images()) > worst(model, plain, images()) + 1
    assert better.SerializeToString() == asked.SerializeToString()
    assert "Cross-layer equalization of 4 pairs" in caplog.text and "kept" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["A8W8", "U8S8_AAWS"])
def test_float_scales_of_whole_weights_gain_too(name: str) -> None:
    model = badly_scaled(chain(), CHAIN)
    plain, better = (quantized(model, images(), include, name=name) for include in (False, True))
    asked = quantized(model, images(), False, CLEConfig(), name=name)
    assert worst(model, better, images()) > worst(model, plain, images()) + 1
    stored = [
        {tensor.name: numpy_helper.to_array(tensor) for tensor in each.graph.initializer} for each in (better, asked)
    ]
    assert stored[0].keys() == stored[1].keys()
    for key, array in stored[0].items():
        # The ranges are those of x * s, which rounds other than a convolution with scaled weights; a step at most.
        codes = array.dtype.kind in "iu" and array.dtype.itemsize == 1
        np.testing.assert_allclose(np.float64(array), stored[1][key], rtol=1e-5, atol=codes + 1e-6, err_msg=key)


@pytest.mark.slow
def test_one_pass_of_the_float_model_tells_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[Any] = []
    collect = calibrate.collect
    monkeypatch.setattr(calibrate, "collect", lambda *given: passes.append(given) or collect(*given))
    run_model, ran = FloatOutputs._run, list[Any]()
    monkeypatch.setattr(FloatOutputs, "_run", lambda *given: ran.append(given) or run_model(*given))
    quantized(badly_scaled(chain(), CHAIN), images(), True, name="A8W8")
    # The two quantized models are compared with what calibration kept.
    assert len(passes) == 1 and len(ran) == 2


@pytest.mark.slow
def test_what_does_not_pay_is_left_out(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels made to differ by 10^4 are worse: the model is what it is without, bit for bit."""

    def spoil(first: Any, second: Any, threshold: float = 0.0) -> Any:
        return np.logspace(-2, 2, len(first))

    monkeypatch.setattr("quark.onnx.algorithms.rescaling.cle.equalizing_scale", spoil)
    model = chain()
    plain, kept = (quantized(model, images(), include) for include in (False, True))
    assert plain.SerializeToString() == kept.SerializeToString()
    assert "left out" in caplog.text


@pytest.mark.slow
def test_only_the_model_that_is_kept_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    corrected: list[QuantizedLayers] = []
    monkeypatch.setattr(flow, "correct_where_certain", lambda quantized: corrected.append(quantized) or 0)
    done = quantized(badly_scaled(chain(), CHAIN), images(), True, name="A8W8")
    (one,) = corrected
    assert [node.name for node in one.decision.model.graph] == [node.name for node in done.graph.node]


@pytest.mark.slow
def test_other_algorithms_run_on_what_was_kept() -> None:
    model = badly_scaled(chain(), CHAIN)
    found = [quantized(model, images(), include, BiasCorrection=True) for include in (False, True)]
    assert worst(model, found[1], images()) > worst(model, found[0], images()) + 1


@pytest.mark.slow
def test_a_model_without_pairs_is_quantized_once_and_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    plain, same = (quantized(mlp(), vectors(), include) for include in (False, True))
    assert plain.SerializeToString() == same.SerializeToString()
    assert "equalization" not in caplog.text and "qualifies" not in caplog.text


@pytest.mark.slow
def test_without_data_nothing_is_decided(caplog: pytest.LogCaptureFixture) -> None:
    config = get_default_config("XINT8")
    config.extra_options["UseRandomData"] = True
    assert ModelQuantizer(Config(config)).quantize_model(perceptron(), None, None) is not None
    assert "equalization" not in caplog.text


@pytest.mark.slow
def test_ranges_of_a_file_are_those_of_the_model_as_it_is(tmp_path: Path) -> None:
    """Equalized, it would have others, and what is read again without data is not decided again."""
    model = badly_scaled(chain(), CHAIN)
    stored = str(tmp_path / "ranges.npz")
    plain = quantized(model, images(), False)
    kept = quantized(model, images(), True, Statistics=stored)
    assert plain.SerializeToString() == kept.SerializeToString()
    again = ModelQuantizer(_config(Statistics=stored)).quantize_model(model, None, None)
    assert again is not None and len(again.graph.node) == len(plain.graph.node)


@pytest.mark.parametrize(("after", "kept"), [(10.0, True), (9.99, False), (math.nan, False)])
def test_what_loses_no_more_is_equalized(after: float, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = SimpleNamespace(is_gated=False)
    monkeypatch.setattr(module, "equalized_pairs", lambda *_: [(pair, None)])
    monkeypatch.setattr(module, "_compare", lambda *_, **__: ({False: "plain", True: "equalized"}, [10.0, after]))
    prepared: Any = SimpleNamespace(model=SimpleNamespace(clone=lambda: None), data=[0])
    settings = Settings(SpecSettings(LayerSpec()), equalization=CLEConfig(), equalize_if_better=True)
    decided, written = module.equalize_if_better(prepared, settings, lambda *_: pytest.fail("not asked"))
    assert (decided.equalization is not None, written) == (kept, "equalized" if kept else "plain")
    assert not decided.equalize_if_better
