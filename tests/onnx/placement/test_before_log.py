"""Layers whose products a logarithm takes keep float activations where an input is quantized as it comes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from quark.core.metrics import sqnr
from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.graph.model_file import load
from quark.onnx.placement.kernels import nodes_before_log
from tests.models.onnx_zoo import Array, Builder, run

KEEP = ("floor", "wide", "unbounded", "sum")
"""What leaves a tensor its orders of magnitude."""


def log_mel(opset: int = 17) -> onnx.ModelProto:
    """Power spectra, a filter bank, a floor, a logarithm, and a layer behind it."""
    b = Builder()
    b.node("Mul", ["x", "x"], "power")
    b.node("MatMul", ["power", b.constant("bank", b.random.uniform(0, 1, (64, 16)) ** 4)], "mel")
    b.node("Clip", ["mel", b.constant("floor", np.array(1e-9))], "floored")
    b.node("MatMul", [b.node("Log", ["floored"], "log"), b.constant("head", b.random.normal(0, 0.2, (16, 8)))], "y")
    return b.model({"x": ["n", 64]}, {"y": ["n", 8]}, opset)


def spectra() -> Array:
    """Rows over five orders of magnitude."""
    random = np.random.default_rng(1)
    return (random.normal(size=(64, 64)) * 10 ** random.uniform(-5, 0, (64, 1))).astype(np.float32)


@pytest.mark.parametrize("opset", [11, 17])
def test_the_weight_alone_is_stored_as_integers(opset: int) -> None:
    source, config = log_mel(opset), QConfig.get_default_config("UINT8_DYNAMIC_QUANT")
    quantized = ModelQuantizer(config).quantize_model(source)
    assert quantized is not None
    kinds = [node.op_type for node in quantized.graph.node]
    assert kinds.count("MatMulInteger") == 1 and kinds.count("MatMul") == 1 and "DequantizeLinear" in kinds
    feed = {"x": spectra()}
    assert sqnr(run(source, feed), run(quantized, feed)) > 30


def test_what_a_saturation_limits_is_not_before_a_logarithm() -> None:
    """A Softmax, a Relu and a Clip to a narrow range stand between; a floor, sums and other layers do not."""
    b = Builder()
    for name, op_type, more in (
        ("softmax", "Softmax", []),
        ("relu", "Relu", []),
        ("bounded", "Clip", ["low", "high"]),
        ("floor", "Clip", ["low"]),
        ("wide", "Clip", ["low", "highest"]),
        ("unbounded", "Clip", ["", "high"]),
        ("sum", "Add", ["low"]),
    ):
        inner = b.node("MatMul", ["x", b.constant(f"{name}_a", np.eye(4))], f"{name}_inner")
        product = b.node("MatMul", [inner, b.constant(f"{name}_b", np.eye(4))], f"{name}_product")
        b.node("Log", [b.node(op_type, [product, *more], f"{name}_limited")], f"{name}_y")
    b.constant("low", np.array(0.1))
    b.constant("high", np.array(6.0))
    b.constant("highest", np.array(3e38))
    outputs = {node.output[0]: [2, 4] for node in b.nodes if node.op_type == "Log"}
    found = {node.name for node in nodes_before_log(load(b.model({"x": [2, 4]}, outputs)).graph)}
    assert found == {f"{name}_{part}_node" for name in KEEP for part in ("inner", "product")}
