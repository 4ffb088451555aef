"""Stored codes of a weight become float values, by the formulas of the formats that published folders come in.

    w[i, j] = (code[i, j] - zero[i // r, j // c]) * scale[i // r, j // c] / divisor * factor

in float32, in tiles of r x c, the last cut, rounded once to the dtype of the model. Codes are FP8, int8, integers in
words of 32 bits, FP4 in bytes, two in each, or FP6 (E2M3), four in three bytes; the lowest bits first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quark.core.array import row_chunks
from quark.core.dtypes import DTYPES
from quark.core.packing import decode as values_of
from quark.core.scales import exp2
from quark.errors import FormatError, NotSupportedError
from quark.torch.checkpoint.finite import is_finite
from quark.torch.formats.layout import unpack_words

_MX_GROUP = 32
"""Values under one exponent in the MX formats."""


@dataclass(frozen=True)
class Tile:
    """Rows and columns that share a scale, where config.json says it; 0: whatever divides the matrix."""

    rows: int = 0
    columns: int = 0


@dataclass(frozen=True)
class StoredCodes:
    """A weight as a file holds it.

    Attributes:
        name: Of the layer, for messages.
        stored: StoredCodes, (rows, columns), or packed along the columns.
        scale: One, one for each row, or one for each tile: floats, or exponents of two with an offset of 127 in bytes.
        packed: Whether one element of `stored` holds several codes.
        zero: Zero points, as the scale lies; packed along the rows where they are 32-bit words.
        order: Group of each column; None: columns lie in groups one after another.
        divisor: The scale of the scales, which they are divided by (compressed-tensors).
        factor: The scale of the scales, which they are multiplied by (ModelOpt).
        tile: What config.json says.
        widths: Bits of codes in words that config.json names; none: any.
    """

    name: str
    stored: torch.Tensor
    scale: torch.Tensor
    packed: bool = False
    zero: torch.Tensor | None = None
    order: torch.Tensor | None = None
    divisor: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    tile: Tile = Tile()
    widths: tuple[int, ...] = ()


def decode(codes: StoredCodes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The float weight.

    Args:
        codes: What is stored.
        shape: (rows, columns) of the float weight.
        dtype: To round to.

    Raises:
        FormatError: StoredCodes, scales or zero points are not of such a weight, or a value is NaN or infinite.
        NotSupportedError: Packed floats of another width than 4 bits.
    """
    name, stored = codes.name, codes.stored
    unpack, bits = _unpacker(codes, shape)
    scale = scales(name, _matrix(codes.scale))
    if codes.divisor is not None:
        scale = scale / _one_scale(name, codes.divisor)
    if codes.factor is not None:
        scale = scale * _one_scale(name, codes.factor)
    zero = _zero_point(codes.zero, bits, shape[0])
    if codes.order is not None:
        columns = _groups_of_columns(name, codes.order, scale.shape[1], shape)
        scale, zero = scale[:, columns], None if zero is None else zero[:, columns]
    if zero is not None and zero.shape != scale.shape:
        raise FormatError(f"{name}: zero points of shape {tuple(zero.shape)} beside scales of {tuple(scale.shape)}.")
    out = torch.empty(shape, dtype=dtype)
    rows, columns_per_scale = _tile_of(name, codes.tile, scale, shape)
    for piece in row_chunks(shape[0], 4 * shape[1], 1 << 20):
        values = unpack(stored[piece])
        if zero is not None:
            values = values - _spread(zero, piece, rows, columns_per_scale, shape)
        out[piece] = (values * _spread(scale, piece, rows, columns_per_scale, shape)).to(dtype)
        require_finite(name, out[piece])
    return out


def require_finite(name: str, values: torch.Tensor) -> None:
    """Raise FormatError for NaN or infinity among decoded values: a code of NaN, or a product beyond their type."""
    if not is_finite(values):
        raise FormatError(f"{name} cannot be read: it decodes to NaN or infinity.")


def _groups_of_columns(name: str, order: torch.Tensor, groups: int, shape: tuple[int, ...]) -> torch.Tensor:
    columns = order.long()
    if tuple(columns.shape) != shape[1:] or not bool(((columns >= 0) & (columns < groups)).all()):
        raise FormatError(f"{name}: the groups of its columns (weight_g_idx) are not those of its scales.")
    return columns


def _unpacker(codes: StoredCodes, shape: tuple[int, ...]) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    """The function from some stored rows to their values before scaling, and bits of a code."""
    name, stored = codes.name, codes.stored
    if not codes.packed:
        if tuple(stored.shape) != shape:
            raise FormatError(f"{name}.weight has shape {tuple(stored.shape)}; the model needs {shape}.")
        return torch.Tensor.float, 8
    if stored.dtype in (torch.uint8, torch.int8):
        return _unpacker_of_bytes(codes, shape)
    if stored.dtype != torch.int32:
        raise NotSupportedError(f"{name}: weights packed into {stored.dtype} are not read; possible: int32, uint8.")
    # As many bits as the words that hold a row say.
    widths = [bits for bits in range(1, 9) if tuple(stored.shape) == (shape[0], -(-shape[1] * bits // 32))]
    if len(widths) != 1:
        raise FormatError(f"{name}: packed words of shape {tuple(stored.shape)} do not hold a weight of {shape}.")
    bits = widths[0]
    if codes.widths and bits not in codes.widths:
        raise FormatError(f"{name}: words of {bits}-bit codes, and config.json names {codes.widths} bits.")
    return lambda words: _integers(words, bits, shape[1]), bits


def _unpacker_of_bytes(
    codes: StoredCodes, shape: tuple[int, ...]
) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    """The unpacker of floats of 4 or 6 bits in bytes."""
    name, rows, width = codes.name, *codes.stored.shape
    known = {2 * width: (unpack_fp4, 4), 4 * width // 3: (unpack_fp6, 6)}
    if shape[1] not in known or rows != shape[0]:
        raise FormatError(f"{name}: packed bytes of shape {(rows, width)} do not hold a weight of {shape}.")
    if codes.zero is not None:
        raise NotSupportedError(f"{name}: packed floats with zero points are not read; possible: without.")
    return known[shape[1]]


def scales(name: str, stored: torch.Tensor) -> torch.Tensor:
    """Scales in float32: of bytes, the powers of two that they are exponents of, with an offset of 127.

    Raises FormatError for NaN or infinity among them.
    """
    exponents = stored.dtype == torch.uint8
    values = exp2(stored.int() - 127) if exponents else stored.float()
    if bool((stored == 255).any() if exponents else (~values.isfinite()).any()):
        raise FormatError(f"{name} cannot be read: its scales are NaN or infinite.")
    return values


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """E2M1 values of bytes, (..., n) -> (..., 2n), float32."""
    packed = packed.view(torch.uint8)
    halves = torch.stack((packed & 15, packed >> 4), -1)
    return values_of(halves, DTYPES["fp4_e2m1"]).flatten(-2)


def unpack_fp6(packed: torch.Tensor) -> torch.Tensor:
    """E2M3 values of bytes, (..., 3 n) -> (..., 4 n), float32."""
    first, second, third = packed.int().reshape(*packed.shape[:-1], -1, 3).unbind(-1)
    word = first | second << 8 | third << 16
    codes = torch.stack([word >> shift & 63 for shift in (0, 6, 12, 18)], -1)
    return values_of(codes, DTYPES["fp6_e2m3"]).flatten(-2)


def float_shape(
    stored: torch.Tensor, shape: torch.Tensor | None = None, scale: torch.Tensor | None = None
) -> tuple[int, ...]:
    """The shape of a packed float weight.

    Args:
        stored: Its codes; may be on the meta device.
        shape: What is stored of it; None: as many columns as the codes hold.
        scale: Of the codes: bytes are FP6 where 24 of them have one exponent, else FP4.
    """
    if shape is not None:
        return tuple(int(size) for size in shape)
    columns = stored.shape[-1]
    if stored.dtype not in (torch.uint8, torch.int8):
        return (*stored.shape[:-1], columns * 8)
    groups = scale.shape[-1] if scale is not None and scale.ndim and scale.dtype == torch.uint8 else 0
    fp6 = groups > 0 and 4 * columns == 3 * _MX_GROUP * groups
    return (*stored.shape[:-1], _MX_GROUP * groups if fp6 else 2 * columns)


def _one_scale(name: str, x: torch.Tensor) -> torch.Tensor:
    """The one scale of the scales of a tensor, float32 (1, 1)."""
    if x.numel() != 1:
        raise FormatError(f"{name}: a scale of the scales of shape {tuple(x.shape)}; one number is needed.")
    value = scales(name, x.reshape(1, 1))
    if not bool(value > 0):
        raise FormatError(f"{name} cannot be read: the scale of its scales is not positive.")
    return value


def _zero_point(zero: torch.Tensor | None, bits: int, rows: int) -> torch.Tensor | None:
    if zero is None:
        return None
    zero = _matrix(zero)
    if zero.dtype == torch.int32:
        # Packed along the rows.
        return _integers(zero.t().contiguous(), bits, rows).t()
    return zero.float()


def _tile_of(name: str, tile: Tile, scale: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns per scale."""
    sides = list(zip(shape, scale.shape, (tile.rows, tile.columns), strict=True))
    rows, columns = (
        length if count == 1 else 1 if count == length else said or length // max(1, count)
        for length, count, said in sides
    )
    sizes = zip(sides, (rows, columns), strict=True)
    if any(size == 0 or -(-length // size) != count for (length, count, _), size in sizes):
        raise FormatError(f"{name}: a scale of shape {tuple(scale.shape)} does not fit a weight of {shape}.")
    return rows, columns


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """A scale as a matrix: one for the tensor, for each row, or for each tile (ModelOpt's are (n, 1, m, 1))."""
    if x.ndim == 4 and x.shape[1] == x.shape[3] == 1:
        return x[:, 0, :, 0]
    return x if x.ndim == 2 else x.reshape(-1, 1)


def _spread(x: torch.Tensor, piece: slice, rows: int, columns: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The tiles of some rows of the matrix, one value for each element (or broadcastable)."""
    index = torch.arange(piece.start, piece.stop) // rows
    part = x[index]
    return part if part.shape[1] == 1 else part.repeat_interleave(columns, 1)[:, : shape[1]]


def _integers(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Signed integers of int32 words, stored with an offset of half their range, least significant first."""
    return unpack_words(words, bits, count).float() - (1 << (bits - 1))
