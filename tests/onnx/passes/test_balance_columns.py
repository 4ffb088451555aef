"""Stacked matrices, for which integer kernels have one scale: columns of different size keep their digits."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from quark.core.metrics import sqnr
from quark.onnx import ModelQuantizer
from tests.models.onnx_zoo import Array, Builder, outputs, stored

SIZES = np.geomspace(1, 100, 24)


def stack() -> tuple[onnx.ModelProto, dict[str, Array]]:
    """y = x @ W, W (4, 16, 24) with columns from 1 to 100, and one of zeros."""
    b = Builder()
    weight = b.random.normal(size=(4, 16, 24)) * SIZES
    weight[1, :, 3] = 0
    b.node("MatMul", ["x", b.constant("w", weight)], "y")
    source = b.model({"x": ["n", 4, 8, 16]}, {"y": ["n", 4, 8, 24]})
    return source, {"x": b.random.normal(size=(3, 4, 8, 16)).astype(np.float32)}


@pytest.mark.parametrize("preset", ["INT8_CPU", "INT8_CPU_DYNAMIC", "UINT8_DYNAMIC_QUANT", "A16W8"])
def test_every_column_keeps_its_digits(preset: str) -> None:
    source, sample = stack()
    done = ModelQuantizer(preset).quantize_model(source, None, [sample])
    assert done is not None
    onnx.checker.check_model(done, full_check=True)
    expected, found = outputs(source, sample)[0] / SIZES, outputs(done, sample, optimise=True)[0] / SIZES
    assert sqnr(expected, found) > 35


def test_what_is_excluded_or_alike_stays_as_it_is() -> None:
    source, sample = stack()
    b = Builder()
    b.node("MatMul", ["x", b.constant("w", b.random.normal(size=(4, 16, 24)))], "y")
    alike = b.model({"x": ["n", 4, 8, 16]}, {"y": ["n", 4, 8, 24]})
    done = ModelQuantizer("INT8_CPU_DYNAMIC").quantize_model(alike, None, None)
    assert done is not None and "y_node_balanced" not in {node.name for node in done.graph.node}
    weights = ModelQuantizer("INT8_CPU_WEIGHTS").quantize_model(source, None, None)
    assert weights is not None and sqnr(outputs(source, sample)[0], outputs(weights, sample)[0]) > 35
    assert not [name for name in stored(weights) if "columns" in name]
