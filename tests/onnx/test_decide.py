"""Deciding: a Relu goes only where its readers are clipped by what is quantized."""

from __future__ import annotations

import numpy as np
import pytest

from quark.onnx import quantize_static
from quark.onnx.config.enums import QuantType
from tests.models.onnx_bodies import identity_if
from tests.models.onnx_zoo import Builder, Reader, run


@pytest.mark.parametrize("fold", [False, True])
def test_a_relu_whose_output_a_body_reads_is_not_folded(fold: bool) -> None:
    b = Builder()
    weight = b.constant("w", b.random.normal(0, 0.5, (8, 8)))
    b.node("Relu", [b.node("MatMul", ["x", weight], "product")], "positive")
    b.node("MatMul", ["positive", weight], "y")
    identity_if(b, "positive", "copied")
    model = b.model({"x": ["n", 8]}, {"copied": ["n", 8], "y": ["n", 8]})
    feeds = [{"x": np.random.default_rng(seed).normal(size=(3, 8)).astype(np.float32)} for seed in range(4)]
    options = {"FoldRelu": fold}
    quantized = quantize_static(model, None, Reader(feeds), activation_type=QuantType.QUInt8, extra_options=options)
    assert quantized is not None
    assert run(model, feeds[0]).min() == 0 and run(quantized, feeds[0]).min() == 0
