"""Fake quantization of live tensors as ONNX functions has the values of core, in stock ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from quark.core.granularity import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.rounding import RoundType
from quark.core.scales import QParams
from quark.core.schemes import SCHEMES
from quark.core.spec import ScaleRule, ScaleType, spec
from quark.errors import NotSupportedError
from quark.onnx_ops.live import live
from quark.onnx_ops.operators import DOMAIN, Operator, block, function

Array = np.ndarray[Any, Any]
OPSET = 21


def values(shape: tuple[int, ...], seed: int = 0) -> Array:
    """Rows of different magnitudes with outliers, and one row of zeros."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape) * 10.0 ** random.uniform(-3, 3, (*shape[:-1], 1))
    x = np.where(random.random(shape) < 0.02, x * 30, x)
    x.reshape(-1, shape[-1])[-1] = 0
    return x.astype(np.float32)


def run(operator: Operator, x: Array, *others: Array, known: bool = True) -> Array:
    """The operator on x, in a session with nothing registered."""
    names = ["x", *(f"i{position}" for position in range(len(others)))]
    node = helper.make_node(operator.name, names, ["y"], domain=DOMAIN, **operator.attributes)
    node.overload = operator.overload
    shape = list(x.shape) if known else [None] * x.ndim
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    inputs += [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, o.shape) for n, o in zip(names[1:], others, strict=True)
    ]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[function(operator, OPSET)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(names, (x, *others), strict=True)))[0]


def compare(found: Array, expected: Array) -> None:
    """Equal: not one code may differ, and scales only in the last bit."""
    assert np.allclose(found, expected, rtol=3e-7, atol=1e-30)


LIVE = {name: layer.input for name, layer in SCHEMES.items() if layer.input is not None and layer.input.dynamic}
WIDE = [PerTensor(), PerToken(), PerGroup(-1, 32), PerGroup(1, 5), PerGroup(-1, 40, pad=True), PerGroup(-1, -1)]


@pytest.mark.parametrize("name", LIVE)
@pytest.mark.parametrize("known", [True, False])
def test_the_live_tensors_of_every_scheme(name: str, known: bool) -> None:
    spec, x = LIVE[name], values((2, 5, 64) if known else (2, 3, 5, 64))
    shape = x.shape if known else (None, None, None, 64)
    if spec.is_cast:
        return
    if spec.code_spec is not None:
        pytest.skip("no live tensor has quantized codes")
    second = None if spec.scale_spec is None else QParams(np.asarray(np.abs(x).max() / 6 / 448, np.float32))
    operator = block(spec, OPSET, shape) if spec.is_block else live(spec, shape)
    params = None
    if second is not None:
        from quark.core.quantize import quantize_scales

        assert spec.scale_spec is not None
        params = quantize_scales(compute_qparams(x, replace(spec, scale_spec=None)), second, spec)
    found = run(operator, x, *([] if second is None else [second.scale]))
    compare(found, fake_quantize(x, params, spec))


@pytest.mark.parametrize("granularity", WIDE, ids=str)
@pytest.mark.parametrize(
    "dtype", ["int2", "int4", "uint4", "int8", "uint8", "int16", "fp8_e4m3", "fp6_e2m3", "fp4_e2m1"]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_types_and_granularities(dtype: str, granularity: Any, symmetric: bool) -> None:
    x = values((3, 5, 64))
    wanted = spec(dtype, granularity, symmetric=symmetric, dynamic=True)
    compare(run(live(wanted, x.shape), x), fake_quantize(x, None, wanted))


@pytest.mark.parametrize("rounding", RoundType)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "fp8_e5m2"])
def test_roundings(dtype: str, rounding: RoundType) -> None:
    x = values((7, 64))
    wanted = spec(dtype, PerToken(), rounding=rounding, dynamic=True)
    compare(run(live(wanted, x.shape), x), fake_quantize(x, None, wanted))


@pytest.mark.parametrize("scale_type", [s for s in ScaleType if s not in (ScaleType.float8_e8m0fnu, ScaleType.int16)])
@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "fp4_e2m1"])
def test_scale_types(dtype: str, scale_type: ScaleType) -> None:
    x = values((7, 64))
    wanted = spec(dtype, PerGroup(-1, 16), scale_type=scale_type, dynamic=True)
    compare(run(live(wanted, x.shape), x), fake_quantize(x, None, wanted))


@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("dtype", ["fp4_e2m1", "fp6_e3m2", "fp8_e4m3", "mxint8"])
def test_exponent_rules_have_the_bits_of_core(dtype: str, rule: ScaleRule) -> None:
    x = np.concatenate([values((9, 96)), (1 - values((9, 96), 3) * 2.0**-20) * 2.0**5])
    wanted = spec(dtype, PerGroup(-1, 32, pad=True), scale_type=ScaleType.float8_e8m0fnu, scale_rule=rule, dynamic=True)
    for shape in (x.shape, None):
        found = run(block(wanted, OPSET, shape), x)
        assert np.array_equal(found, fake_quantize(x, None, wanted))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", ["int2", "int3", "uint2", "fp6_e2m3", "fp4_e2m1"])
def test_given_scales(dtype: str, symmetric: bool) -> None:
    x = values((4, 64))
    wanted = spec(dtype, symmetric=symmetric)
    params = compute_qparams(x, wanted)
    zero = np.zeros((), np.float32) if params.zero_point is None else np.asarray(params.zero_point, np.float32)
    found = run(live(wanted, x.shape, given=True), x, np.asarray(params.scale, np.float32), zero)
    compare(found, fake_quantize(x, params, wanted))


def test_a_float_zero_point() -> None:
    x = values((4, 64)) + 3
    wanted = spec("uint4", PerGroup(-1, 32), symmetric=False, float_zero_point=True, dynamic=True)
    compare(run(live(wanted, x.shape), x), fake_quantize(x, None, wanted))


def test_what_has_no_form_is_refused() -> None:
    for granularity in (PerChannel(1), PerBlock((4, 4))):
        with pytest.raises(NotSupportedError, match="per tensor, token or group"):
            live(spec("int8", granularity, dynamic=True), (4, 8))
    with pytest.raises(NotSupportedError, match="length of axis -1"):
        live(spec("int8", PerToken(), dynamic=True), (4, None))
    with pytest.raises(NotSupportedError, match="static scales"):
        live(spec("int8", PerToken()), (4, 8), given=True)
    with pytest.raises(NotSupportedError, match="no ONNX form"):
        live(spec("int32", dynamic=True), (4, 8))
