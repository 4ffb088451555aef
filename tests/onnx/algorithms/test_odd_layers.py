"""Algorithms on layers behind operators of other domains, on products of other ranks, on views and on nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from quark.core.metrics import sqnr
from quark.core.solvers.equalize import channel_range
from quark.onnx import (
    AdaQuantConfig,
    AdaRoundConfig,
    BiasCorrectionConfig,
    GPTQConfig,
    Int8Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    UInt8Spec,
)
from tests.models import onnx_odd as odd
from tests.models.onnx_zoo import outputs

LAYER = QLayerConfig(input_tensors=UInt8Spec(), weight=Int8Spec())
ALGORITHMS = [
    GPTQConfig(),
    AdaRoundConfig(num_iterations=20),
    AdaQuantConfig(num_iterations=20),
    BiasCorrectionConfig(),
]
NORMS: dict[str, tuple[list[str], list[str], dict[str, Any]]] = {
    "SkipLayerNormalization": (["h", "x", "gain", "bias"], ["n", "", "", "s"], {"domain": "com.microsoft"}),
    "SkipSimplifiedLayerNormalization": (["h", "x", "gain"], ["n", "", "", "s"], {"domain": "com.microsoft"}),
    "SimplifiedLayerNormalization": (["h", "gain"], ["n"], {"axis": -1}),
}


def after(norm: str) -> onnx.ModelProto:
    """A layer that reads what a norm gives whose type no inference knows."""
    b = odd.Odd()
    b.node("MatMul", ["x", b.weight("w", 8, 8)], "h")
    b.constant("gain", np.ones(8))
    b.constant("bias", np.zeros(8))
    inputs, made, attributes = NORMS[norm]
    b.raw(norm, inputs, made, **attributes)
    b.node("MatMul", [b.node("Relu", [b.node("MatMul", ["n", b.weight("w2", 8, 8)], "m")], "r"), "w"], "y")
    return b.finish({"x": [1, 4, 8]}, {"y": [1, 4, 8]}, more=["com.microsoft"])


def near(model: onnx.ModelProto, algorithm: Any) -> None:
    feeds = [odd.sample(model, seed) for seed in range(16)]
    found = ModelQuantizer(QConfig(LAYER, algo_config=[algorithm], AllowNoop=True)).quantize_model(model, None, feeds)
    assert found is not None
    for expected, got in zip(outputs(model, feeds[0]), outputs(found, feeds[0]), strict=True):
        assert sqnr(expected, got) > 20


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
@pytest.mark.parametrize("norm", NORMS)
def test_a_layer_behind_an_operator_of_unknown_type(norm: str, algorithm: Any) -> None:
    near(after(norm), algorithm)


@pytest.mark.slow
@pytest.mark.parametrize("make", [odd.matrices_of_other_ranks, odd.another_domain], ids=lambda make: make.__name__)
def test_products_of_constants_and_other_domains(make: odd.Make) -> None:
    near(make(), GPTQConfig())


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS[1:3], ids=lambda algorithm: type(algorithm).__name__)
def test_a_weight_behind_a_transpose(algorithm: Any) -> None:
    near(odd.embedding_and_head(), algorithm)


def test_the_range_of_no_values_is_zero() -> None:
    assert channel_range(np.zeros((3, 0)), 0).tolist() == [0, 0, 0]
