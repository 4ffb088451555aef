"""Codes to bytes and back.

    bits      word = sum over i of code[order[i]] << (bits * i), 8 codes a word, its first `bits` bytes stored
    floats    code = sign | exponent + bias | mantissa, as IEEE 754 lays out its fields

Eight uint8 codes are read as one little-endian 64-bit word, so a word is packed by 8 shifts and masks whatever the
bit width; nothing loops over elements. `order` permutes the codes of a word: AWQ_ORDER is the nibble order of
AWQ's GEMM kernels, MSB_PAIRS puts the first 2-bit value on top of its byte.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from quark.core.array import Array, astype, is_torch, like, namespace, pad_axis, row_chunks, view
from quark.core.dtypes import Dtype
from quark.errors import ShapeError

SEQUENTIAL = tuple(range(8))
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MSB_PAIRS = (3, 2, 1, 0, 7, 6, 5, 4)

assert sys.byteorder == "little", "quark packs through little-endian words"


def encode(values: Array, dtype: Dtype) -> Array:
    """Bit patterns (uint8, int32 or int64 by width) of `values`, floats that `dtype` holds exactly."""
    if not dtype.is_float:
        if dtype.bits > 16:
            return astype(values, "int64")
        return astype(astype(values, "int32") & ((1 << dtype.bits) - 1), "uint8" if dtype.bits <= 8 else "int32")
    xp, sign_bit = namespace(values), 1 << (dtype.bits - 1)
    bits = view(values, "int32")
    magnitude = bits & 0x7FFFFFFF
    code = (magnitude >> (23 - dtype.mbits)) - ((127 - dtype.bias) << dtype.mbits)
    if dtype.ebits < 8:
        # Below 2^emin codes are evenly spaced; above it this is the first normal code at most.
        small = xp.clip(view(magnitude, "float32"), None, 2.0**dtype.emin)
        small *= 2.0 ** (dtype.mbits - dtype.emin)
        code = xp.maximum(code, astype(small, "int32"))
    if dtype.signed:
        code |= (bits >> (32 - dtype.bits)) & sign_bit
    return astype(code, "uint8" if dtype.bits <= 8 else "int32")


def decode(codes: Array, dtype: Dtype) -> Array:
    """The values of bit patterns made by `encode`: float32, float64 for 32-bit integers."""
    if dtype.is_float:
        return like(_values(dtype), codes)[astype(codes, "int64")]
    if dtype.bits > 16:
        return astype(codes, "float64")
    values = astype(codes, "int32")
    if dtype.signed:
        # Moves the sign bit to the top of the word and back, which extends it.
        values = (values << (32 - dtype.bits)) >> (32 - dtype.bits)
    return astype(values, "float32")


@cache
def _values(dtype: Dtype) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """All values of a float type, by code."""
    codes = np.arange(1 << dtype.bits)
    field = codes & ((1 << (dtype.ebits + dtype.mbits)) - 1)
    exponent, mantissa = field >> dtype.mbits, field & ((1 << dtype.mbits) - 1)
    fraction = mantissa / 2.0**dtype.mbits
    magnitude = np.where(exponent == 0, fraction * 2.0**dtype.emin, (1 + fraction) * 2.0 ** (exponent - dtype.bias))
    magnitude = np.where(magnitude > dtype.max, np.nan, magnitude)
    sign = np.where((codes >> (dtype.ebits + dtype.mbits)) & 1, -1.0, 1.0) if dtype.signed else 1.0
    return (sign * magnitude).astype(np.float32)


def pack_bits(codes: Array, bits: int, order: Sequence[int] = SEQUENTIAL) -> Array:
    """Pack uint8 codes of `bits` bits along the last axis into bytes.

    Args:
        codes: uint8, shape (..., n) with n * bits divisible by 8 (and n by 8 unless `order` is sequential).
        bits: Width of one code, 1 to 8.
        order: order[i] is the code of each 8 that goes to bits [bits * i, bits * (i + 1)).

    Returns:
        uint8 of shape (..., n * bits / 8).
    """
    n = codes.shape[-1]
    if (n * bits) % 8 or (tuple(order) != SEQUENTIAL and n % 8):
        raise ShapeError(
            f"Cannot pack an axis of {n} codes of {bits} bits into whole words; "
            f"its length must be a multiple of {8 if tuple(order) != SEQUENTIAL else 8 // math.gcd(bits, 8)}."
        )
    if 0 in codes.shape:
        return codes[..., : n * bits // 8]
    if bits == 4 and tuple(order) == SEQUENTIAL:
        pairs = view(_flat(codes), "int16").reshape(*codes.shape[:-1], n // 2)
        return astype((pairs | (pairs >> 4)) & 0xFF, "uint8")
    codes = pad_axis(codes, codes.ndim - 1, -n % 8)
    words = view(_flat(codes), "int64")
    packed = namespace(codes).empty_like(words)
    mask = (1 << bits) - 1
    for rows in _chunks(words):
        word = words[rows]
        if bits == 4 and tuple(order) == AWQ_ORDER:
            packed[rows] = _awq_nibbles(word)
            continue
        total = (word >> (8 * order[0])) & mask
        for i in range(1, 8):
            total |= ((word >> (8 * order[i])) & mask) << (bits * i)
        packed[rows] = total
    out = view(packed, "uint8").reshape(*codes.shape[:-1], -1, 8)[..., :bits]
    return out.reshape(*codes.shape[:-1], -1)[..., : n * bits // 8]


def _chunks(words: Array) -> Iterable[slice]:
    """Rows of words that stay in the cache; all at once where there are none but in shape."""
    return [slice(None)] if getattr(words, "is_meta", False) else row_chunks(words.shape[0], 8)


def _awq_nibbles(word: Array) -> Array:
    """Eight 4-bit codes in AWQ_ORDER, in half the steps: even bytes close up by two shifts, odd bytes likewise."""
    even, odd = word & 0x000F000F000F000F, (word >> 8) & 0x000F000F000F000F
    even |= even >> 12
    even |= even >> 24
    odd |= odd >> 12
    odd |= odd >> 24
    return (even & 0xFFFF) | ((odd & 0xFFFF) << 16)


def unpack_bits(packed: Array, bits: int, order: Sequence[int] = SEQUENTIAL) -> Array:
    """Inverse of `pack_bits`: uint8 (..., m) to uint8 codes (..., m * 8 / bits)."""
    n = packed.shape[-1] * 8 // bits
    if 0 in packed.shape:
        return pad_axis(packed, packed.ndim - 1, n - packed.shape[-1])
    packed = pad_axis(packed, packed.ndim - 1, -packed.shape[-1] % bits)
    words = packed.reshape(*packed.shape[:-1], -1, bits)
    flat = view(_flat(pad_axis(words, words.ndim - 1, 8 - bits)), "int64")
    codes = namespace(flat).empty_like(flat)
    mask = (1 << bits) - 1
    for rows in _chunks(flat):
        word = flat[rows]
        total = (word & mask) << (8 * order[0])
        for i in range(1, 8):
            total |= ((word >> (bits * i)) & mask) << (8 * order[i])
        codes[rows] = total
    return view(codes, "uint8").reshape(*packed.shape[:-1], -1)[..., :n]


def pack_int4(codes: Array, order: Sequence[int] = AWQ_ORDER) -> Array:
    """Pack 4-bit codes (uint8, shape (..., n), n divisible by 8) into int32 words, shape (..., n / 8)."""
    if codes.shape[-1] % 8:
        raise ShapeError(f"Cannot pack an axis of {codes.shape[-1]} 4-bit codes into int32: a multiple of 8 is needed.")
    packed = pack_bits(codes, 4, order)
    return view(_flat(packed), "int32").reshape(*codes.shape[:-1], codes.shape[-1] // 8)


def unpack_int4(words: Array, order: Sequence[int] = AWQ_ORDER) -> Array:
    """Inverse of `pack_int4`: int32 (..., m) to uint8 codes (..., 8 m)."""
    return unpack_bits(view(_flat(words), "uint8").reshape(*words.shape[:-1], -1), 4, order)


def _flat(x: Array) -> Array:
    """All elements in order, along one axis: what may be viewed as words whatever the strides of x."""
    return (x.contiguous() if is_torch(x) else np.ascontiguousarray(x)).reshape(-1)
