"""quantize, dequantize, fake_quantize: properties that hold for every combination of type, split and rule."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from quark.core.array import Array
from quark.core.dtypes import DTYPES
from quark.core.granularity import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quark.core.packing import decode
from quark.core.quantize import (
    FakeQuantizer,
    compute_qparams,
    dequantize,
    fake_quantize,
    quantize,
    range_of,
    recover_codes,
)
from quark.core.rounding import RoundType
from quark.core.scales import QParams
from quark.core.schemes import SCHEMES
from quark.core.spec import ScaleType, TensorSpec, spec
from quark.errors import ConfigError

SPLITS: list[Granularity] = [PerTensor(), PerChannel(0), PerToken(), PerGroup(-1, 4), PerGroup(0, 8, pad=True)]
PLAIN = [name for name, row in DTYPES.items() if not row.is_block and name not in ("float16", "bfloat16")]


def specs_of(name: str) -> list[TensorSpec]:
    """Every split and scale type of one element type, with the other choices taken in turn."""
    row = DTYPES[name]
    splits = [split for split in SPLITS if isinstance(split, PerGroup) or not row.is_block]
    kinds = [kind for kind in ScaleType if row.is_float or row.is_block or kind is not ScaleType.float8_e8m0fnu]
    choices = itertools.cycle(itertools.product(RoundType, [True, False]))
    made = []
    for split, kind in itertools.product(splits, kinds):
        rounding, symmetric = next(choices)
        symmetric = symmetric or row.is_float or row.is_block
        made.append(spec(name, split, scale_type=kind, rounding=rounding, symmetric=symmetric))
    return made


def assert_in_range(x: np.ndarray, params: QParams, tensor: TensorSpec) -> None:
    """Codes are codes, and what lies in range moves by half a step at most (one step when rounded down)."""
    row, split = tensor.dtype, tensor.split
    codes, y = quantize(x, params, tensor), dequantize(quantize(x, params, tensor), params, tensor)
    assert row.min <= codes.min() and codes.max() <= row.max
    wide = split.block_shape(x.shape)
    scale = split.unblock(np.broadcast_to(split.to_blocks(params.scale, x.shape), wide), x.shape).astype(np.float64)
    zero = np.zeros_like(scale)
    if params.zero_point is not None:
        assert np.all((row.min <= params.zero_point) & (params.zero_point <= row.max)) or tensor.float_zero_point
        zero = split.unblock(np.broadcast_to(split.to_blocks(params.zero_point, x.shape), wide), x.shape)
    assert np.all(scale > 0) or row.is_float
    inside = (x >= (row.min - zero) * scale) & (x <= (row.max - zero) * scale)
    step = scale
    if row.is_float:
        size = np.maximum(abs(x), np.float64(2.0**row.emin) * scale)
        step = size * 2.0**-row.mbits
    allowed = step if tensor.rounding is RoundType.floor else step / 2
    # Each float32 operation may add half an ulp; a float zero point adds that of its own size.
    slack = (abs(x) + abs(zero) * scale) * 2.0**-21 + 2.0**-149
    assert np.all(abs(x - y.astype(np.float64))[inside] <= (allowed + slack)[inside])


@pytest.mark.parametrize("name", DTYPES)
def test_every_combination_on_both_libraries(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((7, 12)) * np.geomspace(1e-4, 1e3, 7)[:, None]
    x = x.astype(np.float32)
    x[3] = abs(x[3])
    x[4] = 0
    for tensor in specs_of(name):
        t = torch.from_numpy(x)
        if tensor.is_cast:
            assert np.array_equal(fake_quantize(x, None, tensor), fake_quantize(t, None, tensor).numpy())
            continue
        ours, theirs = compute_qparams(x, tensor), compute_qparams(t, tensor)
        assert np.array_equal(ours.scale, theirs.scale.numpy()), tensor
        codes, other = quantize(x, ours, tensor), quantize(t, theirs, tensor).numpy()
        assert np.array_equal(codes.astype(np.float32).view(np.int32), other.astype(np.float32).view(np.int32)), tensor
        assert np.array_equal(fake_quantize(x, ours, tensor), fake_quantize(t, theirs, tensor).numpy()), tensor
        assert_in_range(x, ours, tensor)


ARRAYS = npst.arrays(
    np.float32,
    npst.array_shapes(min_dims=1, max_dims=3, max_side=9).map(lambda shape: (*shape[:-1], 4 * shape[-1])),
    elements=st.floats(min_value=-(2.0**60), max_value=2.0**60, width=32),
)


@settings(max_examples=25)
@pytest.mark.parametrize("name", PLAIN)
@given(x=ARRAYS, split=st.sampled_from(SPLITS), symmetric=st.booleans(), rounding=st.sampled_from(RoundType))
def test_in_range_values_move_by_half_a_step(
    name: str, x: np.ndarray, split: Granularity, symmetric: bool, rounding: RoundType
) -> None:
    symmetric = symmetric or DTYPES[name].is_float
    tensor = spec(name, split, symmetric=symmetric, rounding=rounding)
    params = compute_qparams(x, tensor)
    assert_in_range(x, params, tensor)
    if rounding is not RoundType.floor:
        y = fake_quantize(x, params, tensor)
        assert np.array_equal(y, fake_quantize(y, params, tensor))
        assert np.array_equal(y, fake_quantize(torch.from_numpy(x), params_of_torch(params), tensor).numpy())


def params_of_torch(params: QParams) -> QParams:
    zero = None if params.zero_point is None else torch.from_numpy(np.asarray(params.zero_point))
    return QParams(torch.from_numpy(np.asarray(params.scale)), zero)


@given(
    low=st.floats(-100, 100),
    width=st.floats(0.5, 100),
    name=st.sampled_from(["uint4", "int4", "uint8", "int8", "int2"]),
)
def test_float_zero_point(low: float, width: float, name: str) -> None:
    x = np.linspace(low, low + width, 50, dtype=np.float32)
    tensor = spec(name, symmetric=False, float_zero_point=True)
    params = compute_qparams(x, tensor)
    assert_in_range(x, params, tensor)
    y = fake_quantize(x, params, tensor)
    # The two ends are codes themselves: no part of the type is wasted.
    assert y[0] == pytest.approx(x[0], abs=1e-4) and y[-1] == pytest.approx(x[-1], abs=1e-4)
    assert len(np.unique(y)) == min(50, 2 ** DTYPES[name].bits)


@pytest.mark.parametrize("name", ["int8", "uint8", "int4"])
def test_rounding_modes_of_codes(name: str) -> None:
    row = DTYPES[name]
    zero = np.float32(0 if row.signed else 8)
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, -0.49999997, 3.2, -3.2], np.float32)
    for rounding, codes in {
        RoundType.half_even: [0, 2, 2, 0, -2, -2, 0, 0, 3, -3],
        RoundType.round: [1, 2, 3, -1, -2, -3, 0, 0, 3, -3],
        RoundType.floor: [0, 1, 2, -1, -2, -3, 0, -1, 3, -4],
    }.items():
        tensor = spec(name, rounding=rounding)
        for library in (np.asarray, torch.from_numpy):
            params = QParams(library(np.ones((), np.float32)), library(np.full((), zero)))
            got = quantize(library(x), params, tensor)
            assert np.asarray(got).tolist() == [code + zero for code in codes]


def test_integers_multiply_by_the_reciprocal_and_floats_divide() -> None:
    """One x where the two differ, and the documented rule for each kind."""
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.01, 1, 100_000).astype(np.float32)
    x = ((rng.integers(-7, 7, 100_000) + 0.5) * scale).astype(np.float32)
    product, quotient = np.round(x * (np.float32(1) / scale)), np.round(x / scale)
    i = int(np.flatnonzero((product != quotient) & (abs(product) < 7))[0])
    params = QParams(scale[i], np.float32(0))
    assert quantize(x[i : i + 1], params, spec("int4"))[0] == product[i] != quotient[i]
    ties = (rng.choice([1.25, 1.75, 2.5, 3.5], 100_000) * scale).astype(np.float32)
    table = np.array([1, 1.5, 2, 3, 4], np.float32)

    def fp4(v: np.ndarray) -> np.ndarray:
        return table[abs(v[:, None] - table).argmin(axis=1)]

    differ = np.flatnonzero(fp4(ties / scale) != fp4(ties * (np.float32(1) / scale)))
    off = differ[~np.isin(ties[differ] / scale[differ], [1.25, 1.75, 2.5, 3.5])]
    assert len(off) > 0
    for i in off[:50]:
        code = quantize(ties[i : i + 1], QParams(scale[i]), spec("fp4_e2m1"))
        assert code[0] == fp4(ties[i : i + 1] / scale[i])[0]


BIG = {
    PerTensor(): (700, 512),
    PerChannel(0): (700, 512),
    PerChannel(1): (700, 512),
    PerToken(): (3, 301, 257),
    PerGroup(-1, 32): (701, 512),
    PerGroup(0, 32): (704, 509),
    PerBlock((32, 64)): (704, 512),
}


@pytest.mark.parametrize("split", BIG, ids=str)
@pytest.mark.parametrize("name", ["int4", "uint8", "fp8_e4m3"])
def test_chunks_do_not_show(name: str, split: Granularity) -> None:
    """Tensors of several cache chunks: the fused path equals the two plain steps."""
    x = np.random.default_rng(1).standard_normal(BIG[split], dtype=np.float32)
    tensor = spec(name, split, symmetric=DTYPES[name].is_float)
    params = compute_qparams(x, tensor)
    expected = dequantize(quantize(x, params, tensor), params, tensor)
    assert np.array_equal(fake_quantize(x, params, tensor), expected)
    assert np.array_equal(fake_quantize(torch.from_numpy(x), None, tensor).numpy(), expected)


@pytest.mark.parametrize("rounding", [RoundType.half_even, RoundType.floor])
@pytest.mark.parametrize("split", [PerTensor(), PerChannel(0), PerChannel(1), PerGroup(-1, 4)], ids=str)
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric", "float_zero_point"])
def test_scales_that_stay_give_the_plain_two_steps(kind: str, split: Granularity, rounding: RoundType) -> None:
    for name, shape in itertools.product(("int4", "uint8", "int16"), [(5, 8), (257, 132)]):
        floats = kind == "float_zero_point"
        tensor = replace(spec(name, split, symmetric=kind == "symmetric"), rounding=rounding, float_zero_point=floats)
        x = np.random.default_rng(2).standard_normal(shape, dtype=np.float32) + np.float32(0.3)
        params = compute_qparams(x * np.float32(0.8), tensor)  # some values are beyond the range
        expected = dequantize(quantize(x, params, tensor), params, tensor)
        assert not np.array_equal(expected, x)
        out = np.empty_like(x)
        FakeQuantizer(params, tensor, shape)(x, out)
        assert np.array_equal(out, expected)
        y, zero = torch.from_numpy(x.copy()), params.zero_point
        moved = QParams(torch.as_tensor(params.scale), None if zero is None else torch.as_tensor(zero))
        FakeQuantizer(moved, tensor, shape)(y, y)
        assert np.array_equal(y.numpy(), expected)


def test_casts_in_chunks() -> None:
    x = np.random.default_rng(1).standard_normal((700, 512), dtype=np.float32)
    for library in (np.asarray, torch.from_numpy):
        assert np.array_equal(np.asarray(fake_quantize(library(x), None, spec("float16"))), x.astype(np.float16))


@pytest.mark.parametrize(
    "split", [PerTensor(), PerChannel(0), PerChannel(1), PerGroup(-1, 4), PerBlock((3, 4))], ids=str
)
def test_range_of(split: Granularity) -> None:
    x = np.random.default_rng(2).standard_normal((6, 8)).astype(np.float32)
    blocks = split.blocks(x)
    axes = split.axes(2)
    for library in (np.asarray, torch.from_numpy):
        low, high = range_of(library(x), spec("int8", split))
        assert np.array_equal(np.asarray(low), blocks.min(axis=axes))
        assert np.array_equal(np.asarray(high), blocks.max(axis=axes))


def test_range_of_one_value_per_channel_is_a_copy() -> None:
    x = np.ones(4, np.float32)
    for library in (np.asarray, torch.from_numpy):
        low, high = range_of(library(x), spec("int8", PerChannel(0)))
        x += 1
        assert float(low[0]) == float(high[0]) == x[0] - 1


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "mxfp4", "nvfp4", "bfp16"])
def test_float16_saturates_instead_of_becoming_infinite(name: str) -> None:
    tensor = SCHEMES[name].weight if name in SCHEMES else spec(name)
    x = np.tile(np.array([65504, -65504, 61000, -1, 0, 1, 2, 3], np.float16), 4)
    assert tensor is not None
    for library in (np.asarray, torch.from_numpy):
        y = np.asarray(fake_quantize(library(x), None, tensor))
        assert y.dtype == np.float16 and np.isfinite(y).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nan_is_not_hidden(dtype: str) -> None:
    """A NaN in a live tensor stays one; the observers refuse it for static ones."""
    x = torch.tensor([1.0, float("nan"), 2.0]).to(getattr(torch, dtype))
    for name in ("int8", "fp8_e4m3", "float16"):
        assert fake_quantize(x, QParams(torch.tensor(1.0)), spec(name)).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["uint8", "int8", "fp8_e4m3", "int4"])
def test_recover_codes_from_a_half_precision_tensor(name: str, dtype: str) -> None:
    """Every code under many scales (an algorithm may have chosen any): a neighbour of the naive code at worst."""
    row, half = DTYPES[name], getattr(torch, dtype)
    codes = decode(torch.arange(1 << row.bits).to(torch.uint8), row)
    codes = codes[codes.isfinite()]
    tensor = spec(name, symmetric=row.is_float)
    moved = 0
    for scale in np.linspace(0.0039, 0.0079, 200, dtype=np.float32):
        params = QParams(torch.tensor(scale), None if row.is_float else torch.tensor(float(row.min)))
        frozen = dequantize(codes, params, tensor).to(half)
        naive = quantize(frozen, params, tensor)
        found = recover_codes(frozen, naive, params, tensor)
        assert torch.equal(dequantize(found, params, tensor).to(half), frozen)
        assert (found - naive).abs().max() <= 1
        moved += int((found != naive).sum())
    assert (moved > 0) == (dtype == "bfloat16" and row.bits == 8 and not row.is_float)


def test_a_user_array_is_never_changed() -> None:
    for library, name in itertools.product((np.asarray, torch.from_numpy), DTYPES):
        granularity = PerGroup(-1, 4) if DTYPES[name].is_block else PerChannel(0)
        x = library(np.random.default_rng(3).standard_normal((4, 8)).astype(np.float32))
        before: Array = x.copy() if isinstance(x, np.ndarray) else x.clone()
        tensor = spec(name, granularity)
        if not tensor.is_cast:
            params = compute_qparams(x, tensor)
            codes = quantize(x, params, tensor)
            kept = np.asarray(codes).copy()
            dequantize(codes, params, tensor)
            assert np.array_equal(np.asarray(codes), kept)
        fake_quantize(x, None, tensor)
        assert np.array_equal(np.asarray(x), np.asarray(before))


def test_specs_that_contradict_themselves_are_refused() -> None:
    scales = spec("fp8_e4m3")
    with pytest.raises(ConfigError, match="not both"):
        spec("fp4_e2m1", PerGroup(-1, 16), scale_spec=scales, code_spec=scales)
    for bad in ({"symmetric": True}, {}):
        with pytest.raises(ConfigError, match="asymmetric"):
            spec("int8", float_zero_point=True, **bad)
    with pytest.raises(ConfigError, match="asymmetric"):
        replace(scales, float_zero_point=True, symmetric=False)
    with pytest.raises(ConfigError, match="Did you mean 'int8'"):
        spec("int08")


def test_specs_print_what_they_do() -> None:
    """The split, the scale type and the second level can be read off a plan."""
    nvfp4 = str(SCHEMES["nvfp4"].weight)
    assert nvfp4.startswith("fp4_e2m1") and "16" in nvfp4 and nvfp4.endswith("on scales") and "fp8_e4m3" in nvfp4
    assert "asymmetric" in str(SCHEMES["uint4_wo_32"].weight) and "dynamic" in str(SCHEMES["mxfp4"].input)
    assert "e8m0" in str(SCHEMES["mxfp4"].weight) and str(SCHEMES["int8"]).startswith("weight: int8")
    assert str(type(SCHEMES["int8"])()) == "float"
