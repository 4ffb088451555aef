"""Shared-exponent and two-level formats against slow implementations that walk one block at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quark.core.dtypes import DTYPES, MICRO_EXPONENT
from quark.core.granularity import PerChannel, PerGroup
from quark.core.quantize import compute_qparams, fake_quantize, quantize
from quark.core.spec import ScaleRule, ScaleType, TensorSpec, spec
from quark.errors import ConfigError
from tests.core.oracles import bfp_block, code_times_step, e8m0_exponent, magnitudes, micro_block, mx_block, nearest

Block = Callable[[list[float]], list[float]]
MX = [name for name, row in DTYPES.items() if row.is_float and row.signed and row.bits <= 8]


def both(x: np.ndarray, tensor: TensorSpec) -> np.ndarray:
    """Fake-quantized x; numpy and torch must agree."""
    y = fake_quantize(x, None, tensor)
    assert np.array_equal(y, fake_quantize(torch.from_numpy(x), None, tensor).numpy())
    return y  # type: ignore[no-any-return]


def blockwise(x: np.ndarray, axis: int, size: int, block: Block) -> np.ndarray:
    """`block` over runs of `size` along `axis`; the last run is filled with zeros."""
    moved = np.moveaxis(x, axis, -1)
    out = np.empty_like(moved)
    for index in np.ndindex(moved.shape[:-1]):
        row = moved[index].tolist()
        row += [0.0] * (-len(row) % size)
        done = [y for i in range(0, len(row), size) for y in block(row[i : i + size])]
        out[index] = done[: moved.shape[-1]]
    return np.moveaxis(out, -1, axis)


def inputs(seed: int) -> np.ndarray:
    """Wide and narrow blocks, zeros, powers of two and values on ties."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((6, 100)) * 2.0 ** rng.integers(-40, 40, (6, 1))
    x[1] = np.round(x[1] / 2.0**36) * 2.0 ** rng.integers(-3, 3, 100)
    x[2] *= 2.0 ** rng.integers(-6, 6, 100)
    x[3, :64] = rng.integers(-257, 258, 64) / 2
    x[4, 20:60] = 0
    x[5] = rng.choice([-1, 1], 100) * 2.0 ** rng.integers(-8, 2, 100) * rng.choice([1, 1.5, 127 / 128, 255 / 256], 100)
    return x.astype(np.float32)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", sorted(MICRO_EXPONENT))
def test_micro_exponent_formats(name: str, axis: int) -> None:
    row, x = DTYPES[name], inputs(0)
    x = x if axis else np.ascontiguousarray(x.T)
    y = both(x, spec(name, PerGroup(axis, row.block, pad=True)))
    assert np.array_equal(y, blockwise(x, axis, row.block, lambda block: micro_block(block, row.bits)))


@pytest.mark.parametrize("size", [2, 4, 32])
@pytest.mark.parametrize("name", sorted(MICRO_EXPONENT))
def test_micro_exponent_formats_of_other_block_sizes(name: str, size: int) -> None:
    x = inputs(1)
    y = both(x, spec(name, PerGroup(-1, size, pad=True)))
    assert np.array_equal(y, blockwise(x, -1, size, lambda block: micro_block(block, DTYPES[name].bits)))


@pytest.mark.parametrize("axis", [0, 1])
def test_bfp16(axis: int) -> None:
    for seed in range(4):
        x = inputs(seed)
        x = x if axis else np.ascontiguousarray(x.T)
        assert np.array_equal(both(x, spec("bfp16", PerGroup(axis, 8, pad=True))), blockwise(x, axis, 8, bfp_block))


def test_bfp16_doubles_its_step_only_when_a_code_leaves_the_range() -> None:
    tensor = spec("bfp16", PerGroup(-1, 8, pad=True))
    steps = {127.0: 1, 127.49: 1, 127.5: 2, -128.0: 2, -127.49: 1, -127.75: 1, 64.0: 1}
    for value, step in steps.items():
        assert compute_qparams(np.array([value], np.float32), tensor).scale[0] == step, value
    # -128 alone has its own exponent, 7, so its step is 2; -127.75 rounds to -128, which the type holds.


@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("name", MX)
def test_ocp_mx_floats(name: str, rule: ScaleRule) -> None:
    row = DTYPES[name]
    table = magnitudes(row.ebits, row.mbits, row.max)
    tensor = spec(name, PerGroup(-1, 32, pad=True), scale_type=ScaleType.float8_e8m0fnu, scale_rule=rule)
    for seed in (0, 1):
        x = inputs(seed)
        expected = blockwise(x, -1, 32, lambda block: mx_block(block, table, row.mbits, row.emax, rule.value))
        assert np.array_equal(both(x, tensor), expected)


@pytest.mark.parametrize("rule", ScaleRule)
def test_ocp_mx_int8(rule: ScaleRule) -> None:
    """Elements are code / 64 with codes within +-127, under a power of two."""

    def block(values: list[float]) -> list[float]:
        amax = max(map(abs, values))
        exponent = e8m0_exponent(amax, 8, 0, rule.value) - 6 if amax else 0
        return [code_times_step(v, exponent, -127, 127) for v in values]

    tensor = spec("mxint8", PerGroup(-1, 32, pad=True), scale_type=ScaleType.float8_e8m0fnu, scale_rule=rule)
    x = inputs(2)
    assert np.array_equal(both(x, tensor), blockwise(x, -1, 32, block))


def nvfp4(x: np.ndarray, size: int, scales: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """FP4 groups under E4M3 (or E5M3) scales under one float32 scale; float32 step by step, one group at a time."""
    f4 = magnitudes(2, 1, 6)
    groups = x.reshape(-1, size)
    first = [np.abs(group).max() / np.float32(6) for group in groups]
    second = np.float32(max(first) / np.float32(scales[-1]))
    out = np.empty_like(groups)
    for group, scale, y in zip(groups, first, out, strict=True):
        code = np.float32(nearest(np.float64(scale / second), scales, signed=False)) or np.float32(1)
        step = np.float32(code * second)
        y[:] = nearest(group / step, f4).astype(np.float32) * step
    return out.reshape(x.shape), second


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("scale_dtype", ["fp8_e4m3", "fp8_e5m3"])
def test_two_level_fp4(scale_dtype: str, size: int) -> None:
    row = DTYPES[scale_dtype]
    scales = magnitudes(row.ebits, row.mbits, row.max)
    tensor = spec("fp4_e2m1", PerGroup(-1, size), scale_spec=spec(scale_dtype))
    rng = np.random.default_rng(3)
    x = rng.standard_normal((24, 96)) * 2.0 ** rng.integers(-14, 4, (24, 1))
    x[5] = 0
    x[7, 32:64] = 1e-9
    x = x.astype(np.float32)
    expected, second = nvfp4(x, size, scales)
    params = compute_qparams(x, tensor)
    assert params.second is not None and params.second.scale == second
    assert np.array_equal(both(x, tensor), expected)
    # The documented single formula, max(amax) / (6 * 448), is the same number but for the order of two roundings.
    assert abs(second - np.abs(x).max() / np.float32(6 * row.max)) <= np.spacing(second)
    assert np.all(params.scale > 0) and np.all(params.scale[5] == 1)
    assert np.isin(params.scale.astype(np.float64), scales).all()


def test_progressive_int4_of_fp8() -> None:
    """FP8 codes under one scale, then int4 of those codes per output channel."""
    tensor = spec("fp8_e4m3", code_spec=spec("int4", PerChannel(0)))
    x = np.random.default_rng(4).standard_normal((5, 48)).astype(np.float32)
    scale = np.abs(x).max() / np.float32(448)
    codes = nearest(x / scale, magnitudes(4, 3, 448)).astype(np.float32)
    steps = np.abs(codes).max(axis=1, keepdims=True) / np.float32(7.5)
    small = np.clip(np.round(codes * (np.float32(1) / steps)), -8, 7)
    assert np.array_equal(both(x, tensor), small * steps * scale)
    assert np.array_equal(quantize(x, compute_qparams(x, tensor), tensor), small)


@pytest.mark.slow
@given(block=st.lists(st.floats(min_value=-(2.0**100), max_value=2.0**100, width=32), min_size=16, max_size=16))
def test_any_block(block: list[float]) -> None:
    """Blocks that hypothesis makes up, without denormal steps."""
    if 0 < max(map(abs, block)) < 2.0**-100:
        return
    x = np.array([block], np.float32)
    for name in sorted(MICRO_EXPONENT):
        expected = np.array([micro_block(block, DTYPES[name].bits)], np.float32)
        assert np.array_equal(both(x, spec(name, PerGroup(-1, 16))), expected)
    expected = np.array([bfp_block(block[:8]) + bfp_block(block[8:])], np.float32)
    assert np.array_equal(both(x, spec("bfp16", PerGroup(-1, 8))), expected)
    expected = np.array([mx_block(block, magnitudes(2, 1, 6), 1, 2, "even")], np.float32)
    tensor = spec("fp4_e2m1", PerGroup(-1, 16), scale_type=ScaleType.float8_e8m0fnu)
    assert np.array_equal(both(x, tensor), expected)


def test_specs_that_make_no_block_are_refused() -> None:
    with pytest.raises(ConfigError, match="mx6.*blocks of 16.*PerGroup"):
        spec("mx6")
    with pytest.raises(ConfigError, match="even"):
        spec("mx9", PerGroup(-1, 15))
