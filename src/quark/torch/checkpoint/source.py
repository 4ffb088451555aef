"""A checkpoint folder as float tensors: plain, FP8 in blocks (DeepSeek's weight_scale_inv) or compressed-tensors.

    w[i, j] = (code[i, j] - zero[i // r, j // c]) * scale[i // r, j // c]        tiles of r x c, the last ones cut

in float32, rounded once to the dtype of the model. A code and its scale may lie in different files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quark.core.array import row_chunks
from quark.core.scales import exp2
from quark.errors import ConfigError, FormatError, NotSupportedError
from quark.torch.checkpoint.safetensors_file import TensorFile
from quark.torch.formats.layout import unpack_words

SCALES = ("weight_scale_inv", "weight_scale")
PACKED, SHAPE, ZERO, ORDER = "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"
PARTS = (*SCALES, PACKED, SHAPE, ZERO, ORDER, "input_scale", "input_zero_point", "weight_global_scale")
"""Leaves that describe a stored weight; none of them is a tensor of the float model."""
NOT_FINITE = "values are NaN or infinite"


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise FormatError for a norm or bias with NaN or infinity. It is small, and of every output.

    A single number may be infinite: it is a bound that nothing meets, as those that Gemma 4 clips inputs to.
    """
    if tensor.ndim > 1 or not tensor.is_floating_point():
        return
    values = tensor.float()
    wrong = values.isnan() if tensor.ndim == 0 else ~values.isfinite()
    if bool(wrong.any()):
        raise FormatError(f"{name} cannot be read: its {NOT_FINITE}.")


@dataclass(frozen=True)
class Tile:
    """Rows and columns that share a scale, where config.json says it; 0: whatever divides the matrix."""

    rows: int = 0
    columns: int = 0


class Source:
    """The tensors of a folder by name, as the float model has them.

    Args:
        files: Its safetensors files.
        quantization: The `quantization_config` of its config.json, or None.

    Raises:
        FormatError: A file is absent, truncated or corrupt.
        NotSupportedError: The checkpoint was quantized in a way that is not read.
    """

    def __init__(self, files: list[Path], quantization: dict[str, Any] | None = None) -> None:
        self._files: dict[str, TensorFile] = {}
        for path in files:
            file = TensorFile(path)
            self._files |= dict.fromkeys(file.names, file)
        self._tile = _tile(quantization)
        self._quantized = quantization is not None

    def names(self) -> Iterator[str]:
        """Names of the float tensors."""
        for name in self._files:
            parent, _, leaf = name.rpartition(".")
            if leaf == PACKED:
                yield f"{parent}.weight"
            elif not self._quantized or leaf not in PARTS:
                yield name

    def stored_names(self) -> list[str]:
        """Names of the tensors in the files."""
        return list(self._files)

    def meta(self, name: str) -> torch.Tensor:
        """Dtype and shape of a tensor as it is stored, on the meta device."""
        return self._files[name].meta(name)

    def stored(self, name: str) -> torch.Tensor:
        """A tensor as it is stored."""
        return self._raw(name)

    def metas(self) -> dict[str, torch.Tensor]:
        """Dtype and shape of all tensors as they are stored, on the meta device."""
        return {name: file.meta(name) for name, file in self._files.items()}

    def dtype(self) -> torch.dtype:
        """That of the first float tensor."""
        wide = (file.meta(name).dtype for name, file in self._files.items())
        return next((d for d in wide if d.is_floating_point and d.itemsize > 1), torch.float32)

    def read(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A float tensor.

        Args:
            name: One of `names()`.
            dtype, shape: What the model needs.

        Raises:
            FormatError: It has another shape, lacks its scale, or is a norm or bias that is not finite.
        """
        parent = name.rpartition(".")[0]
        packed = f"{parent}.{PACKED}" in self._files
        stored = self._raw(f"{parent}.{PACKED}" if packed else name)
        if packed or (self._quantized and stored.dtype.itemsize == 1 and name.endswith(".weight")):
            return self._decode(parent, stored, packed, dtype, shape)
        if tuple(stored.shape) != shape:
            raise FormatError(f"{name} has shape {tuple(stored.shape)} in the checkpoint; the model needs {shape}.")
        check_finite(name, stored)
        return stored.to(dtype)

    def release(self, name: str) -> None:
        """Give back the memory of what `read` mapped."""
        parent = name.rpartition(".")[0]
        for stored in (name, f"{parent}.{PACKED}"):
            if stored in self._files:
                self._files[stored].release(stored)

    def _raw(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise FormatError(f"The checkpoint has no tensor {name}, which its other tensors need.")
        return self._files[name].read(name)

    def _decode(
        self, parent: str, stored: torch.Tensor, packed: bool, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        names = [f"{parent}.{leaf}" for leaf in SCALES]
        scale = _matrix(self._raw(next((name for name in names if name in self._files), names[0])))
        scale = exp2(scale.int() - 127) if scale.dtype == torch.uint8 else scale.float()
        unpack: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float
        bits = 8
        if packed:
            if f"{parent}.weight_global_scale" in self._files or stored.dtype != torch.int32:
                raise NotSupportedError(f"{parent}: packed floats are not read; possible: integers of 1 to 8 bits.")
            bits = _width(parent, stored, shape)
            unpack = lambda words: _integers(words, bits, shape[1])  # noqa: E731
        elif tuple(stored.shape) != shape:
            raise FormatError(f"{parent}.weight has shape {tuple(stored.shape)}; the model needs {shape}.")
        zero = self._zero_point(parent, bits, shape[0])
        if f"{parent}.{ORDER}" in self._files:
            columns = self._raw(f"{parent}.{ORDER}").long()
            scale, zero = scale[:, columns], None if zero is None else zero[:, columns]
        out = torch.empty(shape, dtype=dtype)
        rows, columns_per_scale = self._tile_of(parent, scale, shape)
        for piece in row_chunks(shape[0], 4 * shape[1], 1 << 20):
            factor = _spread(scale, piece, rows, columns_per_scale, shape)
            values = unpack(stored[piece])
            if zero is not None:
                values = values - _spread(zero, piece, rows, columns_per_scale, shape)
            out[piece] = (values * factor).to(dtype)
        return out

    def _zero_point(self, parent: str, bits: int, rows: int) -> torch.Tensor | None:
        name = f"{parent}.{ZERO}"
        if name not in self._files:
            return None
        zero = _matrix(self._raw(name))
        if zero.dtype == torch.int32:
            # Packed along the rows.
            return _integers(zero.t().contiguous(), bits, rows).t()
        return zero.float()

    def _tile_of(self, parent: str, scale: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns per scale."""
        sides = list(zip(shape, scale.shape, (self._tile.rows, self._tile.columns), strict=True))
        rows, columns = (
            length if count == 1 else 1 if count == length else tile or length // count for length, count, tile in sides
        )
        if any(-(-length // size) != count for (length, count, _), size in zip(sides, (rows, columns), strict=True)):
            raise FormatError(f"{parent}: a scale of shape {tuple(scale.shape)} does not fit a weight of {shape}.")
        return rows, columns


def quantization_of(config: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """The `quantization_config` of a config that can be read. Raises ConfigError or NotSupportedError for others."""
    stored = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(stored, dict):
        return None
    method = stored.get("quant_method")
    if method == "quark":
        raise ConfigError(f"{folder} is quantized by quark already; give the model that it was made from.")
    if method not in ("fp8", "compressed-tensors"):
        raise NotSupportedError(
            f"{folder} is quantized ({method!r}). Possible: float checkpoints, 'fp8' and 'compressed-tensors'; or "
            "quark convert, whose --requantize rounds the values anew."
        )
    return stored


def _tile(quantization: dict[str, Any] | None) -> Tile:
    if quantization is None:
        return Tile()
    sizes = quantization.get("weight_block_size")
    for group in (quantization.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        sizes = weights.get("block_structure") if weights.get("strategy") == "block" else sizes
    if isinstance(sizes, str):
        sizes = [int(side) for side in sizes.split("x")]
    return Tile(*sizes) if sizes else Tile()


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """A scale as a matrix: one for the tensor, for each row, or as it is."""
    return x if x.ndim == 2 else x.reshape(-1, 1)


def _spread(x: torch.Tensor, piece: slice, rows: int, columns: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The tiles of some rows of the matrix, one value for each element (or broadcastable)."""
    index = torch.arange(piece.start, piece.stop) // rows
    part = x[index]
    return part if part.shape[1] == 1 else part.repeat_interleave(columns, 1)[:, : shape[1]]


def _width(parent: str, stored: torch.Tensor, shape: tuple[int, ...]) -> int:
    """Bits of a packed integer, from how many words hold a row."""
    widths = [bits for bits in range(1, 9) if tuple(stored.shape) == (shape[0], -(-shape[1] * bits // 32))]
    if len(widths) != 1:
        raise FormatError(f"{parent}: packed words of shape {tuple(stored.shape)} do not hold a weight of {shape}.")
    return widths[0]


def _integers(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Signed integers of int32 words, stored with an offset of half their range, least significant first."""
    return unpack_words(words, bits, count).float() - (1 << (bits - 1))
