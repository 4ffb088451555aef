"""Integers against ONNX Runtime's QuantizeLinear and DequantizeLinear (opset 21), for every type it has.

ONNX Runtime divides by the scale, the documented system multiplies by its float32 reciprocal. With power-of-two scales
that is the same number; else the two quotients may lie one ulp apart, and the codes differ where a tie lies between.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from quark.core.dtypes import DTYPES
from quark.core.granularity import Granularity, PerChannel, PerGroup, PerTensor
from quark.core.quantize import dequantize, quantize
from quark.core.scales import QParams
from quark.core.spec import TensorSpec

SHAPE = (48, 64)
NAMES = [name for name, row in DTYPES.items() if row.onnx in ("INT4", "UINT4", "INT8", "UINT8", "INT16", "UINT16")]
SPLITS = [PerTensor(), PerChannel(0), PerChannel(1), PerGroup(0, 16), PerGroup(1, 16), PerGroup(1, 32)]


@cache
def session(name: str, split: Granularity, quantizes: bool) -> ort.InferenceSession:
    """x, scale, zero point -> codes (as int32), or codes, scale, zero point -> y. Cast carries the 4-bit types."""
    kind = getattr(TensorProto, DTYPES[name].onnx)
    attributes: dict[str, int] = {}
    if isinstance(split, PerChannel):
        attributes = {"axis": split.axis}
    if isinstance(split, PerGroup):
        attributes = {"axis": split.axis, "block_size": split.size}
    zero = helper.make_node("Cast", ["zero_i32"], ["zero"], to=kind)
    if quantizes:
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"], **attributes),
            helper.make_node("Cast", ["codes"], ["out"], to=TensorProto.INT32),
        ]
        data, result = helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE), TensorProto.INT32
    else:
        nodes = [
            helper.make_node("Cast", ["x"], ["codes"], to=kind),
            helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["out"], **attributes),
        ]
        data, result = helper.make_tensor_value_info("x", TensorProto.INT32, SHAPE), TensorProto.FLOAT
    shape = split.scale_shape(SHAPE)
    scale = helper.make_tensor_value_info("scale", TensorProto.FLOAT, shape)
    point = helper.make_tensor_value_info("zero_i32", TensorProto.INT32, shape)
    output = helper.make_tensor_value_info("out", result, SHAPE)
    graph = helper.make_graph([zero, *nodes], "g", [data, scale, point], [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(name: str, split: Granularity, quantizes: bool, x: np.ndarray, params: QParams) -> np.ndarray:
    feed = {"x": x, "scale": params.scale, "zero_i32": np.asarray(params.zero_point, np.int32)}
    return session(name, split, quantizes).run(None, feed)[0]  # type: ignore[no-any-return]


def parameters(name: str, split: Granularity, power_of_two: bool) -> QParams:
    """Random scales and zero points over the whole range of the type."""
    rng = np.random.default_rng(7)
    shape, row = split.scale_shape(SHAPE), DTYPES[name]
    scale = 2.0 ** rng.integers(-9, 5, shape) if power_of_two else rng.uniform(0.001, 3, shape)
    zero = rng.integers(int(row.min), int(row.max) + 1, shape)
    return QParams(np.asarray(scale, np.float32), np.asarray(zero, np.float32))


def spread(params: QParams, spec: TensorSpec) -> np.ndarray:
    """The scale of each element of a tensor of SHAPE."""
    split = spec.split
    scale = np.broadcast_to(split.to_blocks(params.scale, SHAPE), split.block_shape(SHAPE))
    return split.unblock(scale, SHAPE)


def inputs(name: str, scale: np.ndarray) -> np.ndarray:
    """Values in and just out of range: a third on ties, a third within 3 ulp of a tie, a third anywhere."""
    rng, row = np.random.default_rng(8), DTYPES[name]
    half = (row.max - row.min) * 1.1
    ties = np.floor(rng.uniform(-half, half, SHAPE)) + 0.5
    x = (ties * scale.astype(np.float64)).astype(np.float32)
    steps = rng.integers(-3, 4, SHAPE) * (rng.random(SHAPE) < 0.5)
    x = (x.view(np.int32) + steps.astype(np.int32)).view(np.float32)
    anywhere = (rng.uniform(-half, half, SHAPE) * scale).astype(np.float32)
    return np.where(rng.random(SHAPE) < 0.33, anywhere, x)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_power_of_two_scales_agree_on_everything(name: str, split: Granularity) -> None:
    spec = TensorSpec(DTYPES[name], split, symmetric=False)
    params = parameters(name, split, power_of_two=True)
    x = inputs(name, spread(params, spec))
    codes = quantize(x, params, spec)
    assert np.array_equal(codes, run(name, split, True, x, params))
    assert len(np.unique(codes)) > min(12, DTYPES[name].max - DTYPES[name].min)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_other_scales_differ_only_across_a_tie(name: str, split: Granularity) -> None:
    spec = TensorSpec(DTYPES[name], split, symmetric=False)
    params = parameters(name, split, power_of_two=False)
    scale = spread(params, spec)
    x = inputs(name, scale)
    ours, theirs = quantize(x, params, spec), run(name, split, True, x, params)
    quotient = x / scale
    tie = np.floor(quotient) + np.float32(0.5)
    near = abs(quotient - tie) <= np.maximum(np.spacing(abs(quotient)), np.spacing(abs(tie)))
    assert np.array_equal(ours[~near], theirs[~near])
    assert abs(ours - theirs)[near].max() <= 1
    assert 100 < near.sum() < 0.9 * near.size
    # The documented rule itself, to the bit.
    product = np.clip(np.round(x * (np.float32(1) / scale)), -1e6, 1e6)
    zero = np.broadcast_to(spec.split.to_blocks(params.zero_point, SHAPE), split.block_shape(SHAPE))
    exact = np.clip(product + split.unblock(zero, SHAPE), spec.dtype.min, spec.dtype.max)
    assert np.array_equal(ours, exact)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_dequantize_is_exact(name: str, split: Granularity) -> None:
    spec = TensorSpec(DTYPES[name], split, symmetric=False)
    params = parameters(name, split, power_of_two=False)
    rng = np.random.default_rng(9)
    codes = rng.integers(int(spec.dtype.min), int(spec.dtype.max) + 1, SHAPE).astype(np.int32)
    codes.reshape(-1)[:2] = spec.dtype.min, spec.dtype.max
    ours = dequantize(codes.astype(np.float32), params, spec)
    assert np.array_equal(ours, run(name, split, False, codes, params))
