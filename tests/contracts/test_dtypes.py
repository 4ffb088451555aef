"""Every registered element type: its values, rounding and codes, against `ml_dtypes` and against exhaustive search."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quark.core.dtypes import DTYPES, Dtype, dtype
from quark.core.packing import decode, encode
from quark.core.rounding import RoundType, round_to
from tests.core.oracles import ML_DTYPES, magnitudes, nearest, probes

FLOATS = [row for row in DTYPES.values() if row.is_float]
KNOWN = [row for row in FLOATS if row.name in ML_DTYPES]
INTEGERS = [row for row in DTYPES.values() if not row.is_float]
TIES = {RoundType.half_even: "even", RoundType.round: "away", RoundType.floor: "floor", RoundType.half_up: "up"}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two float32 arrays agree in every bit (signs of zero included)."""
    return np.array_equal(np.asarray(a, np.float32).view(np.int32), np.asarray(b, np.float32).view(np.int32))


def table(row: Dtype) -> np.ndarray:
    return magnitudes(row.ebits, row.mbits, row.max)


def all_values(row: Dtype) -> np.ndarray:
    """All finite values of a float type, float32."""
    values = table(row).astype(np.float32)
    return np.concatenate([values, -values]) if row.signed else values


@pytest.mark.parametrize("name", DTYPES)
def test_row_is_consistent(name: str) -> None:
    row = dtype(name)
    assert row is DTYPES[name] and dtype(row) is row and str(row) == name == row.name
    assert hasattr(torch, row.torch)
    if row.is_float:
        assert row.bits == row.signed + row.ebits + row.mbits
        assert table(row)[-1] == row.max and row.min == (-row.max if row.signed else 0)
        assert 2.0**row.emax <= row.max < 2.0 ** (row.emax + 1)
        assert 2.0**row.emin == table(row)[2**row.mbits]
    elif not row.is_block:
        assert row.max - row.min == 2**row.bits - 1 and row.min == (-(2 ** (row.bits - 1)) if row.signed else 0)
    else:
        assert row.block > 0 and row.max - row.min < 2**row.bits


@pytest.mark.parametrize("row", KNOWN, ids=str)
def test_values_are_those_of_ml_dtypes(row: Dtype) -> None:
    info = ML_DTYPES[row.name]
    codes = np.arange(1 << row.bits).astype(np.uint8 if row.bits <= 8 else np.uint16)
    expected = codes.view(info).astype(np.float32)
    values = decode(codes, row)
    finite = np.isfinite(expected)
    assert same_bits(values[finite], expected[finite])
    assert np.isnan(values[~finite]).all()


@pytest.mark.parametrize("row", FLOATS, ids=str)
@pytest.mark.parametrize("rounding", RoundType)
def test_rounding_finds_the_nearest_value(row: Dtype, rounding: RoundType) -> None:
    x = probes(table(row))
    expected = nearest(x, table(row), TIES[rounding], row.signed).astype(np.float32)
    assert same_bits(round_to(x, row, rounding), expected)
    assert same_bits(round_to(torch.from_numpy(x), row, rounding).numpy(), expected)


@pytest.mark.parametrize("row", KNOWN, ids=str)
def test_rounding_is_the_cast_of_ml_dtypes(row: Dtype) -> None:
    random = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([probes(table(row)), random[np.isfinite(random)]])
    expected = np.clip(x, row.min, row.max).astype(np.float32).astype(ML_DTYPES[row.name]).astype(np.float32)
    assert same_bits(round_to(x, row), expected)


@pytest.mark.parametrize("row", [row for row in KNOWN if hasattr(torch, row.torch) and row.bits >= 8], ids=str)
def test_rounding_is_the_cast_of_torch(row: Dtype) -> None:
    x = torch.from_numpy(probes(table(row))).clip(row.min, row.max)
    cast = x.to(getattr(torch, row.torch))
    assert same_bits(round_to(x, row).numpy(), cast.float().numpy())
    stored = cast.view(torch.uint8 if row.bits == 8 else torch.int16).int() & ((1 << row.bits) - 1)
    assert torch.equal(encode(round_to(x, row), row).int(), stored)


@pytest.mark.parametrize("row", FLOATS, ids=str)
@pytest.mark.parametrize("rounding", RoundType)
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_rounding_keeps_nan_and_saturates_infinity(row: Dtype, rounding: RoundType, library: object) -> None:
    patterns = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFC00000, 0x7F800000, 0xFF800000], np.uint32)
    with np.errstate(invalid="ignore"):
        y = np.asarray(round_to(library(patterns.view(np.float32)), row, rounding))  # type: ignore[operator]
    assert np.isnan(y[:-2]).all() and y[-2] == row.max and y[-1] == row.min


@pytest.mark.parametrize("row", [row for row in DTYPES.values() if row.bits <= 16], ids=str)
def test_rounding_is_idempotent_on_every_code(row: Dtype) -> None:
    values = all_values(row) if row.is_float else np.arange(row.min, row.max + 1, dtype=np.float32)
    for rounding in RoundType:
        assert same_bits(round_to(values, row, rounding), values)


@pytest.mark.parametrize("row", FLOATS, ids=str)
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_float_codes_are_ieee_fields(row: Dtype, library: object) -> None:
    values = library(all_values(row))  # type: ignore[operator]
    codes = encode(values, row)
    count = len(table(row))
    expected = np.arange(count)
    if row.signed:
        expected = np.concatenate([expected, expected | 1 << (row.bits - 1)])
    assert np.array_equal(np.asarray(codes), expected)
    assert str(codes.dtype).removeprefix("torch.") == ("uint8" if row.bits <= 8 else "int32")
    assert same_bits(np.asarray(decode(codes, row)), all_values(row))


@pytest.mark.parametrize("row", KNOWN, ids=str)
def test_float_codes_are_those_of_ml_dtypes(row: Dtype) -> None:
    values = all_values(row)
    expected = values.astype(ML_DTYPES[row.name]).view(np.uint8 if row.bits <= 8 else np.uint16)
    assert np.array_equal(encode(values, row), expected)


@pytest.mark.parametrize("row", INTEGERS, ids=str)
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_integer_codes_are_twos_complement(row: Dtype, library: object) -> None:
    if row.bits <= 16:
        numbers = np.arange(row.min, row.max + 1)
    else:
        numbers = np.unique(np.concatenate([np.linspace(row.min, row.max, 999).astype(np.int64), [row.min, row.max]]))
    values = library(numbers.astype(np.float32 if row.bits <= 16 else np.float64))  # type: ignore[operator]
    codes = encode(values, row)
    assert np.array_equal(np.asarray(codes).astype(np.int64) % (1 << row.bits), numbers % (1 << row.bits))
    if row.bits <= 8:
        assert np.asarray(codes).dtype == np.uint8 and int(np.asarray(codes).max()) < 1 << row.bits
    assert np.array_equal(np.asarray(decode(codes, row)), numbers)


@pytest.mark.parametrize("row", [row for row in INTEGERS if row.bits <= 16], ids=str)
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_integer_rounding(row: Dtype, library: object) -> None:
    values = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, 1e9, -1e9, np.nan], np.float32)
    expected = {
        RoundType.half_even: [0, 2, 2, 0, -2, -2, 0, 1e9, -1e9, np.nan],
        RoundType.round: [1, 2, 3, -1, -2, -3, 0, 1e9, -1e9, np.nan],
        RoundType.floor: [0, 1, 2, -1, -2, -3, 0, 1e9, -1e9, np.nan],
    }
    for rounding, integers in expected.items():
        got = np.asarray(round_to(library(values), row, rounding))  # type: ignore[operator]
        assert np.array_equal(got, np.clip(integers, row.min, row.max), equal_nan=True)
