"""Packed bytes against Python's own big integers, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quark.core.packing import (
    AWQ_ORDER,
    MSB_PAIRS,
    SEQUENTIAL,
    pack_bits,
    pack_int4,
    unpack_bits,
    unpack_int4,
)
from quark.errors import ShapeError

ORDERS = [SEQUENTIAL, AWQ_ORDER, MSB_PAIRS, (7, 6, 5, 4, 3, 2, 1, 0), (1, 0, 3, 2, 5, 4, 7, 6)]
LIBRARIES = pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])


def codes_of(shape: tuple[int, ...], bits: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << bits, shape).astype(np.uint8)


def slow_pack(row: list[int], bits: int, order: tuple[int, ...]) -> list[int]:
    """One row: each 8 codes in `order` are the digits of one little-endian number."""
    padded = row + [0] * (-len(row) % 8)
    out: list[int] = []
    for start in range(0, len(padded), 8):
        number = sum(padded[start + order[i]] << (bits * i) for i in range(8))
        out += number.to_bytes(bits, "little")
    return out[: len(row) * bits // 8]


@LIBRARIES
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("shape", [(8,), (24,), (3, 16), (2, 3, 40), (1, 2, 1, 8)], ids=str)
def test_bytes_are_those_of_the_definition(
    shape: tuple[int, ...], bits: int, order: tuple[int, ...], library: object
) -> None:
    codes = codes_of(shape, bits)
    packed = pack_bits(library(codes), bits, order)  # type: ignore[operator]
    expected = [slow_pack(row.tolist(), bits, order) for row in codes.reshape(-1, shape[-1])]
    assert np.asarray(packed).reshape(len(expected), -1).tolist() == expected
    assert tuple(packed.shape) == (*shape[:-1], shape[-1] * bits // 8)
    assert np.array_equal(np.asarray(unpack_bits(packed, bits, order)), codes)


@pytest.mark.slow
@given(bits=st.integers(1, 8), words=st.integers(0, 5), rows=st.integers(0, 4), seed=st.integers(0, 99))
def test_round_trip_of_short_rows(bits: int, words: int, rows: int, seed: int) -> None:
    """Rows of whole bytes that are not whole words."""
    n = words * 8 // int(np.gcd(bits, 8))
    for codes in (codes_of((rows, n), bits, seed), codes_of((n,), bits, seed)):
        for library in (np.asarray, torch.from_numpy):
            packed = pack_bits(library(codes), bits)
            assert packed.shape[-1] == n * bits // 8
            assert np.array_equal(np.asarray(unpack_bits(packed, bits)), codes)


@LIBRARIES
def test_more_than_one_chunk(library: object) -> None:
    codes = codes_of((3, (1 << 19) + 8), 3)
    packed = pack_bits(library(codes), 3)  # type: ignore[operator]
    assert np.array_equal(np.asarray(unpack_bits(packed, 3)), codes)
    assert np.asarray(packed)[2, -3:].tolist() == slow_pack(codes[2, -8:].tolist(), 3, SEQUENTIAL)


@LIBRARIES
def test_codes_that_are_not_contiguous(library: object) -> None:
    codes = codes_of((16, 24), 4)
    turned = library(codes).swapaxes(0, 1)  # type: ignore[operator]
    assert np.array_equal(np.asarray(pack_bits(turned, 4)), pack_bits(np.ascontiguousarray(codes.T), 4))
    words = pack_int4(turned)
    assert np.array_equal(np.asarray(unpack_int4(words.swapaxes(0, 1).swapaxes(0, 1))), codes.T)


@LIBRARIES
@pytest.mark.parametrize("order", [AWQ_ORDER, SEQUENTIAL], ids=str)
def test_int4_words(order: tuple[int, ...], library: object) -> None:
    codes = codes_of((5, 32), 4)
    words = pack_int4(library(codes), order)  # type: ignore[operator]
    assert np.asarray(words).dtype == np.int32 and tuple(words.shape) == (5, 4)
    expected = [[sum(int(row[8 * w + order[i]]) << (4 * i) for i in range(8)) for w in range(4)] for row in codes]
    assert np.array_equal(np.asarray(words).view(np.uint32), expected)
    assert np.array_equal(np.asarray(unpack_int4(words, order)), codes)


def test_awq_order_is_that_of_its_kernels() -> None:
    """AWQ's GEMM kernels read the nibbles of a word as columns 0, 2, 4, 6, 1, 3, 5, 7."""
    assert pack_int4(np.arange(8, dtype=np.uint8)).view(np.uint32)[0] == 0x75316420
    assert pack_bits(np.array([3, 2, 1, 0] * 2, np.uint8), 2, MSB_PAIRS).tolist() == [0b11100100] * 2


@pytest.mark.parametrize(("n", "bits", "order"), [(3, 4, SEQUENTIAL), (7, 3, SEQUENTIAL), (4, 2, MSB_PAIRS)], ids=str)
def test_part_of_a_byte_is_refused(n: int, bits: int, order: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=f"{n} codes of {bits} bits.*multiple of"):
        pack_bits(np.zeros((2, n), np.uint8), bits, order)


def test_int4_needs_whole_words() -> None:
    with pytest.raises(ShapeError, match="12 4-bit codes.*multiple of 8"):
        pack_int4(np.zeros((2, 12), np.uint8))
