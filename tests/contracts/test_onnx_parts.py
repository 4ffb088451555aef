"""An ONNX model that is wider and longer than every part in which the code takes it: the file is that of all at once.

Ranges are observed some nodes at a time, means of layers some samples at a time, weights are coded some rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.core import array, checks
from quark.onnx import ModelQuantizer
from quark.onnx.algorithms.rounding import rows
from quark.onnx.calibration import byproducts, qparams, sliced_session
from quark.onnx.config.config import Config
from quark.onnx.config.presets import get_default_config
from quark.onnx.graph import channels
from quark.onnx.search.lost_outputs import damage
from tests.models.onnx_zoo import Array, Reader

PARTS: Sequence[tuple[ModuleType, str, int]] = (
    (array, "CACHE_CHUNK", 1000),
    (checks, "_FINITE", 1000),
    (rows, "_ACTIVATED_ROWS", 24),
    (byproducts, "AT_ONCE", 3),
    (qparams, "CHUNK_BYTES", 1000),
    (sliced_session, "SLICE_BYTES", 1000),
    (sliced_session, "MOST_SLICES", 100),
    (channels, "CHUNK_BYTES", 1000),
    (damage, "MOST_BYTES", 1000),
)
"""Module, the field in it, and the size that it gets here."""
INT32 = TensorProto.INT32
CHANNELS, OUTPUTS, WIDTH, PAIRS, SAMPLES = 3000, 1001, 32, 98, 20
OPTIONS: dict[str, dict[str, Any]] = {
    "A8W8": {},
    "S8S8_AAWS": {"BiasCorrection": True},
    "XINT8": {},
    "INT8_CPU": {},
    "INT16_TRANSFORMER_DEFAULT": {},
    "BFP16": {},
    "MX9": {},
    "MATMUL_NBITS": {},
}
"""Preset -> its extra options."""


@cache
def wide_and_long() -> onnx.ModelProto:
    """A layer of 3,000 channels, 1,001 outputs, and 200 nodes in all."""
    random = np.random.default_rng(0)
    sizes = [(WIDTH, CHANNELS), (CHANNELS, WIDTH), *[(WIDTH, WIDTH)] * (PAIRS - 1), (WIDTH, OUTPUTS)]
    nodes, weights, x = [], [], "x"  # by turns of MatMul, whose scales are of columns, and Gemm, of rows
    for index, size in enumerate(sizes):
        weight = random.standard_normal(size).astype(np.float32) * np.float32((2 / size[0]) ** 0.5)
        op, options, weight = ("Gemm", {"transB": 1}, weight.T.copy()) if index % 2 else ("MatMul", {}, weight)
        weights.append(numpy_helper.from_array(weight, f"w{index}"))
        nodes.append(helper.make_node(op, [x, f"w{index}"], [f"m{index}"], name=f"product{index}", **options))
        x = f"m{index}"
        if index < len(sizes) - 1:
            nodes.append(helper.make_node("Relu", [x], [f"r{index}"], name=f"relu{index}"))
            x = f"r{index}"
    assert len(nodes) >= 199
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size]) for name, size in (("x", WIDTH), (x, OUTPUTS))
    ]
    graph = helper.make_graph(nodes, "wide", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def written(preset: str) -> onnx.ModelProto:
    """The quantized model."""
    random = np.random.default_rng(1)
    samples: list[dict[str, Array]] = [
        {"x": random.standard_normal((1, WIDTH)).astype(np.float32)} for _ in range(SAMPLES)
    ]
    config = get_default_config(preset)
    config.extra_options.update(OPTIONS[preset])
    return ModelQuantizer(Config(config)).quantize_model(wide_and_long(), None, Reader(samples))


def apart(made: onnx.ModelProto) -> tuple[bytes, dict[str, Array]]:
    """A model without the codes of its biases, and these."""
    biases = {each.name: numpy_helper.to_array(each) for each in made.graph.initializer if each.data_type == INT32}
    rest = onnx.ModelProto()
    rest.CopyFrom(made)
    for each in rest.graph.initializer:
        if each.name in biases:
            each.ClearField("raw_data")
    return rest.SerializeToString(deterministic=True), biases


@pytest.mark.parametrize(
    "preset", [preset if preset == "INT8_CPU" else pytest.param(preset, marks=pytest.mark.slow) for preset in OPTIONS]
)
def test_a_file_is_that_of_all_at_once(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, before = apart(written(preset))
    for module, name, size in PARTS:
        assert isinstance(getattr(module, name), int)
        monkeypatch.setattr(module, name, size)
    found, after = apart(written(preset))
    assert found == expected and before.keys() == after.keys()
    # Corrected biases are of means, whose sums are of fewer samples here: the last code of one may be the next one.
    most = 1 if "BiasCorrection" in OPTIONS[preset] else 0
    assert all(np.abs(after[name].astype(np.int64) - codes).max() <= most for name, codes in before.items())
