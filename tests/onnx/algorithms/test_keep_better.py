"""Weights of an ONNX model that a solver makes worse stay as they were; the figures are those of ONNX Runtime."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest

from quark.base.log import logger
from quark.core.scales import QParams
from quark.onnx import GPTQConfig
from quark.onnx.algorithms.quantized_layers import QuantizedLayer, QuantizedLayers
from quark.onnx.algorithms.rounding import gptq
from tests.models.onnx_zoo import outputs
from tests.onnx.algorithms.test_gptq import correlated, dense, quantized, stored


@pytest.fixture
def lines() -> Any:
    """The log of the package."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)  # a gain that is kept is no matter of INFO
    yield found
    logger.setLevel(level)
    logger.removeHandler(handler)


def unsolved(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model as GPTQ finds it."""
    monkeypatch.setattr(gptq, "solve_layer", lambda *_: None)
    return quantized(dense(), correlated(), GPTQConfig())


@pytest.mark.slow
def test_figures_are_the_errors_of_the_real_outputs(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    model, feeds = dense(), correlated()

    def error(changed: Any) -> float:
        expected = np.stack([outputs(model, feed)[0] for feed in feeds])
        found = np.stack([outputs(changed, feed)[0] for feed in feeds])
        return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))

    solved = quantized(model, feeds, GPTQConfig())
    (line,) = [line for line in lines if "output error" in line]
    plain = unsolved(monkeypatch)
    before, after = map(float, re.findall(r"error ([\d.e-]+) to nearest, ([\d.e-]+) with gptq: kept", line)[0])
    assert after < before
    assert (before, after) == pytest.approx((error(plain), error(solved)), rel=0.02)


@pytest.mark.slow
def test_what_makes_a_layer_worse_is_undone(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    def spoil(quantized: QuantizedLayers, layer: QuantizedLayer, *_: Any) -> None:
        quantized.set_params(layer, QParams(layer.params.scale * 3, layer.params.zero_point))
        layer.weight = -layer.weight

    plain = stored(unsolved(monkeypatch))
    monkeypatch.setattr(gptq, "solve_layer", spoil)
    left = stored(quantized(dense(), correlated(), GPTQConfig()))
    assert left.keys() == plain.keys()
    assert all(np.array_equal(left[name], plain[name]) for name in plain)
    assert [line.rpartition(": ")[2] for line in lines if "output error" in line][1:] == ["left as it was."]
