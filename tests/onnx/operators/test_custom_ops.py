"""The extended operators: ONNX functions in stock ONNX Runtime, the compiled library and core have the same bits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerGroup
from quark.core.quantize import fake_quantize
from quark.core.rounding import RoundType
from quark.core.spec import ScaleRule, ScaleType, TensorSpec
from quark.errors import ConfigError, MissingDependencyError, NotSupportedError
from quark.onnx.custom_ops import get_library_path
from quark.onnx_ops.operators import ANY, DOMAIN, LINEAR_TYPES, ROUNDING_MODES, Operator, block, function, linear

Array = np.ndarray[Any, Any]
BLOCKS = {"fp4_e2m1": 32, "fp6_e3m2": 32, "fp6_e2m3": 32, "fp8_e4m3": 32, "fp8_e5m2": 32, "mxint8": 32}
BLOCKS |= {"bfp16": 8, "mx4": 16, "mx6": 16, "mx9": 16, "onnx_bfp16": 8, "onnx_mxint8": 32}
DOCUMENTED = json.loads((Path(__file__).parent / "documented_blocks.json").read_text())
"""Values made by the documented operators: those of `x`, and by (element type, rounding mode) what they become."""
SHAPES = [((3, 70, 5, 1), 1), ((4, 64), -1), ((33,), 0), ((2, 5, 40), -2), ((0, 8), 1), ((8, 0), 1), ((3, 0, 2), 2)]
SHAPES += [((2, 32, 3, 5), 1), ((0, 32), -1)]
LINEAR = [(dtype, kind) for dtype in LINEAR_TYPES for kind in ("tensor", "axis")]
LINEAR += [("bfloat16", "cast"), ("float16", "cast")]
KINDS = ("normal", "wide", "subnormal", "ties", "brim", "special", "zero")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUARK_CACHE", str(tmp_path_factory.mktemp("cache")))
        return get_library_path("cpu")


def values(kind: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    random = np.random.default_rng(seed)
    x = random.normal(size=shape)
    if kind == "wide":
        x = x * 2.0 ** random.integers(-140, 127, size=shape)
    if kind == "subnormal":
        x = x * 2.0 ** random.integers(-150, -120, size=shape)
    if kind == "ties":
        x = random.integers(-64, 65, size=shape) / 2.0 ** random.integers(0, 6, size=shape)
    if kind == "brim":
        # Where rounding the largest value carries into the next binade.
        x = random.choice([1, 126.5, 127, 127.25, 127.499, 127.5, 127.75], size=shape) * random.choice(
            [-1, 1], size=shape
        )
    if kind == "special":
        chance = random.random(shape)
        for limit, value in ((0.01, np.nan), (0.02, np.inf), (0.03, -np.inf), (0.05, -0.0), (0.06, 3.4028234e38)):
            x = np.where((chance < limit) & (chance >= limit - 0.02), value, x)
    return np.zeros(shape, np.float32) if kind == "zero" else x.astype(np.float32)


def block_spec(name: str, axis: int, rounding: RoundType = RoundType.half_even) -> TensorSpec:
    ocp = DTYPES[name].is_float or name.endswith("mxint8")
    return TensorSpec(
        DTYPES[name],
        PerGroup(axis, BLOCKS[name], pad=True),
        dynamic=True,
        scale_type=ScaleType.float8_e8m0fnu if ocp else ScaleType.float32,
        scale_rule=ScaleRule.floor if ocp else ScaleRule.even,
        rounding=rounding,
    )


def build(chain: list[tuple[Operator, list[str]]], rank: int, opset: int, constants: dict[str, Any]) -> bytes:
    """A model that applies operators one after another to x; each reads the result of the one before it."""
    nodes, name = [], "x"
    for position, (operator, others) in enumerate(chain):
        node = helper.make_node(operator.name, [name, *others], [f"t{position}"], domain=DOMAIN, **operator.attributes)
        node.overload = operator.overload
        nodes.append(node)
        name = f"t{position}"
    axes = [f"d{i}" for i in range(rank)]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, axes) for n in ("x", name))
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], list(constants.values())),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)],
        functions=[function(operator, opset) for operator, _ in chain],
        ir_version=10,
    )
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def session(model: bytes, compiled: str | None = None) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 2 if compiled else 1
    if compiled:
        options.register_custom_ops_library(compiled)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def wrong(expected: Array, found: Array, signs: bool = True) -> int:
    assert expected.shape == found.shape and found.dtype == np.float32
    same = (expected == found) & ((np.signbit(expected) == np.signbit(found)) | (not signs))
    return int((~(same | (np.isnan(expected) & np.isnan(found)))).sum())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("rounding", [RoundType.half_even, RoundType.round, RoundType.half_up], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_have_the_bits_of_core_as_function_and_as_kernel(name: str, rounding: RoundType, compiled: str) -> None:
    for shape, axis in SHAPES:
        spec = block_spec(name, axis, rounding)
        opset = 14 if axis == 1 else 21
        bodies = {body.overload: body for body in (block(spec, opset), block(spec, opset, (None, *shape[1:])))}
        models = [build([(body, [])], len(shape), opset, {}) for body in bodies.values()]
        functions, kernel = [session(model) for model in models], session(models[-1], compiled)
        for kind in KINDS:
            x = values(kind, shape)
            expected = fake_quantize(x, None, spec)
            for function_ in functions:
                # Half away from zero is Floor and Sign as a function, which loses the sign of a zero.
                signs = rounding is RoundType.half_even
                assert not wrong(expected, function_.run(None, {"x": x})[0], signs), (kind, shape)
            signs = rounding is RoundType.half_even or all(body.name != ANY for body in bodies.values())
            assert not wrong(expected, kernel.run(None, {"x": x})[0], signs), (kind, shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BLOCKS if DTYPES[name].is_float])
def test_ocp_blocks_agree_with_the_standard_and_ml_dtypes(name: str, compiled: str) -> None:
    kinds = {"fp4_e2m1": "float4_e2m1fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    kind = getattr(ml_dtypes, kinds.get(name, f"float6_{name[4:]}fn"))
    x = np.concatenate([values("normal", (50, 64)), values("ties", (50, 64))])
    parts = x.reshape(100, 2, 32)
    _, exponent = np.frexp(np.abs(parts).max(axis=2, keepdims=True))
    scale = 2.0 ** (exponent - 1 - int(np.log2(float(ml_dtypes.finfo(kind).max))))
    limit = float(ml_dtypes.finfo(kind).max)
    expected = (np.clip(parts / scale, -limit, limit).astype(kind).astype(np.float64) * scale).reshape(100, 64)
    model = build([(block(block_spec(name, 1), 17), [])], 2, 17, {})
    for path in (None, compiled):
        assert np.array_equal(session(model, path).run(None, {"x": x})[0], expected)


def documented(x: Array, name: str, mode: int) -> Array:
    """The formula of the integer formats: the exponent of the largest value stays, and codes are clamped."""
    parts = x.astype(np.float64).reshape(-1, BLOCKS[name])
    exponent = np.floor(np.log2(np.abs(parts).max(1, keepdims=True)))
    bits, low = DTYPES[name].bits, -128 if name == "onnx_mxint8" else 1 - 2 ** (DTYPES[name].bits - 1)
    if name.startswith("mx"):
        pairs = np.abs(parts.reshape(len(parts), -1, 2)).max(2)
        exponent = exponent - np.repeat(pairs < 2.0**exponent, 2, axis=1)
    step = 2.0 ** (exponent - bits + 2)
    codes, away = parts / step, np.copysign(0.5, parts)
    codes = (np.trunc(codes + away), np.floor(codes + 0.5), np.rint(codes))[mode]
    found: Array = (np.clip(codes, low, 2 ** (bits - 1) - 1) * step).reshape(x.shape).astype(np.float32)
    return found


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in ("bfp16", "mxint8")])
def test_blocks_become_what_the_documented_operators_make_of_them(name: str, mode: int, compiled: str) -> None:
    """Float elements are rounded half to even whatever the node says."""
    rounding = {m: rounding for rounding, m in ROUNDING_MODES.items()}[mode]
    spec = block_spec(name, 1, RoundType.half_even if DTYPES[name].is_float else rounding)
    x = np.array(DOCUMENTED["x"], np.float32)[None]
    expected = np.array(DOCUMENTED[f"{name} {0 if DTYPES[name].is_float else mode}"], np.float32)[None]
    operator = block(spec, 21, x.shape)
    operator = replace(operator, attributes={**operator.attributes, "rounding_mode": mode})
    model = build([(operator, [])], 2, 21, {})
    assert np.array_equal(fake_quantize(x, None, spec), expected)
    for path in (None, compiled):
        assert np.array_equal(session(model, path).run(None, {"x": x})[0], expected)
        if not DTYPES[name].is_float:
            many = np.concatenate([values("normal", (200, 64)), values("brim", (200, 64))])
            assert np.array_equal(session(model, path).run(None, {"x": many})[0], documented(many, name, mode))


def test_a_nan_makes_its_block_nan_and_no_other() -> None:
    x = values("normal", (2, 64))
    x[0, 3] = np.nan
    for name in BLOCKS:
        y = fake_quantize(x, None, block_spec(name, 1))
        assert np.isnan(y[0, : BLOCKS[name]]).all() and np.isfinite(y[0, BLOCKS[name] :]).all()
        assert np.isfinite(y[1]).all()


def linear_case(dtype: str, kind: str, shape: tuple[int, ...], seed: int = 3) -> tuple[bytes, Array, Array]:
    """(model, scale, zero point), the latter two shaped to broadcast."""
    random, row = np.random.default_rng(seed), DTYPES[dtype]
    size = (shape[1],) if kind == "axis" else ()
    step = 1.0 if row.is_float else 8.0 / 2**row.bits
    scale = np.asarray(1.0 if kind == "cast" else random.uniform(0.5, 1.5, size) * step, np.float32)
    zero = np.full(size, 0.0 if row.signed else 2.0 ** (row.bits - 1) + 3)
    constants = {
        "scale": numpy_helper.from_array(scale, "scale"),
        "zero": helper.make_tensor("zero", TensorProto.DataType.Value(row.onnx), size, zero.ravel().tolist()),
    }
    pair = linear(dtype, kind, 1 if kind == "axis" else None)
    model = build([(operator, ["scale", "zero"]) for operator in pair], len(shape), 17, constants)
    column = (1, -1, *[1] * (len(shape) - 2)) if kind == "axis" else ()
    return model, scale.reshape(column), zero.reshape(column)


def expected_linear(x: Array, dtype: str, scale: Array, zero: Array) -> Array:
    """The formulas, written down once more."""
    if dtype in ("bfloat16", "float16"):
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
        return np.asarray((x / scale).astype(kind).astype(np.float32) * scale, np.float32)
    work, limits = (np.float64 if "32" in dtype else np.float32), np.iinfo(dtype)
    codes = np.rint(x.astype(work) * (work(1) / scale.astype(work))) + zero.astype(work)
    codes = np.where(np.isnan(x), zero, np.clip(codes, limits.min, limits.max))
    return ((codes.astype(work) - zero.astype(work)) * scale.astype(work)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("dtype", "kind"), LINEAR)
def test_linear_pairs_have_the_bits_of_the_formula(dtype: str, kind: str, compiled: str) -> None:
    for shape in ((3, 5, 4), (30000, 3), (0, 5)):
        model, scale, zero = linear_case(dtype, kind, shape)
        function_, kernel = session(model), session(model, compiled)
        for name in KINDS:
            x = values(name, shape)
            expected = expected_linear(x, dtype, scale, zero)
            for found in (function_.run(None, {"x": x})[0], kernel.run(None, {"x": x})[0]):
                assert not wrong(expected, found, signs=DTYPES[dtype].is_float), (name, shape)


def test_blocks_that_fill_their_axis_have_a_shorter_body() -> None:
    spec = block_spec("onnx_bfp16", 1)
    bodies = {shape: block(spec, 17, shape) for shape in ((None, 16, 3, 3), ("n", 12, 3, 3), ("n", 16, "h", 3), (8,))}
    assert [body.overload for body in bodies.values()] == ["to_bfp_16_2_8x9", *["to_bfp_16_2"] * 3]
    short, long = (len(function(bodies[shape], 17).node) for shape in ((None, 16, 3, 3), (8,)))
    assert short < 0.6 * long


def test_a_plain_bfloat16_pair_is_two_casts() -> None:
    for operator in linear("bfloat16", "cast"):
        assert [node.op_type for node in function(operator, 17).node] == ["Cast"]


def test_a_tensor_without_axes_has_no_blocks(compiled: str) -> None:
    model = build([(block(block_spec("bfp16", 0), 17), [])], 0, 17, {})
    for path in (None, compiled):
        with pytest.raises(Exception, match="0 dimensions|ShapeInferenceError"):
            session(model, path).run(None, {"x": np.array(1, np.float32)})


def test_a_kernel_refuses_what_it_cannot_do(compiled: str) -> None:
    operator = block(block_spec("fp4_e2m1", 3), 17)
    model = build([(operator, [])], 2, 17, {})
    with pytest.raises(Exception, match="axis 3 of a tensor of 2 dimensions"):
        session(model, compiled).run(None, {"x": values("normal", (4, 4))})
    unknown = Operator(operator.name, operator.overload, operator.body, {"element_dtype": "fp5"})
    with pytest.raises(Exception, match="no element_dtype fp5"):
        session(build([(unknown, [])], 2, 17, {}), compiled)


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARK_CACHE", str(tmp_path))
    for device in ("CUDA", "rocm"):
        with pytest.raises(NotSupportedError, match=r"get_library_path\('CPU'\).*ONNX functions"):
            get_library_path(device)
    with pytest.raises(ConfigError, match="possible: device 'CPU'"):
        get_library_path("TPU")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingDependencyError, match="no-such-compiler is there.*ONNX functions"):
        get_library_path()
