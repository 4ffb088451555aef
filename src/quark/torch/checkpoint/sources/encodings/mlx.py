"""Folders that MLX quantized: groups of a row, packed into words of 32 bits, the lowest bits first.

affine      w = code * scale + bias                                      2, 3, 4, 5, 6 or 8 bits
mxfp4       w = e2m1(code) * 2^(scale - 127)                             groups of 32
mxfp8       w = e4m3(code) * 2^(scale - 127)                             groups of 32
nvfp4       w = e2m1(code) * e4m3(scale)                                 groups of 16
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from quark.core.dtypes import DTYPES
from quark.core.packing import decode, unpack_bits
from quark.errors import FormatError, NotSupportedError
from quark.torch.checkpoint.sources.decode import scales
from quark.torch.checkpoint.sources.encoded import (
    CODES,
    FLOATS,
    EncodedWeight,
    Files,
    Rows,
    Tensors,
    require_part,
)

SCALES, BIASES = ".scales", ".biases"
_AFFINE = "affine"
_AFFINE_BITS = (2, 3, 4, 5, 6, 8)
FLOAT_MODES = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
"""Mode -> the size of its groups, and bits of a code."""
DEFAULTS = {_AFFINE: (64, 4), **FLOAT_MODES}
"""Mode -> size of groups and bits of a code, where the config says neither."""


class Groups(NamedTuple):
    """How a weight is quantized.

    Attributes:
        size: Values under one scale.
        bits: Of a code.
        mode: One of `DEFAULTS`.
    """

    size: int
    bits: int
    mode: str


def encoded_weights(files: Files, quantization: dict[str, Any]) -> list[EncodedWeight]:
    """The weights that have scales. Raises as `Encoding` says."""
    layers = [name.removesuffix(SCALES) for name in files if name.endswith(SCALES)]
    return [_weight(files, layer, _groups(layer, quantization)) for layer in layers]


def _groups(layer: str, quantization: dict[str, Any]) -> Groups:
    """How a layer is quantized: as the config says of it alone, else of all."""
    own = quantization.get(layer, quantization)
    said = own if isinstance(own, dict) else {}
    mode = said.get("mode") or _AFFINE
    if mode not in DEFAULTS:
        raise NotSupportedError(f"{layer}: the mode {mode!r:.40} of MLX is not read. Possible: {', '.join(DEFAULTS)}.")
    size, bits = (said.get(key) or usual for key, usual in zip(("group_size", "bits"), DEFAULTS[mode], strict=True))
    right = (
        type(size) is int and size > 0 and bits in _AFFINE_BITS if mode == _AFFINE else (size, bits) == DEFAULTS[mode]
    )
    if not right or not isinstance(own, dict):
        raise FormatError(
            f"{layer}: config.json says groups of {size!r:.20} in {bits!r:.20} bits of the mode {mode}"
            f"{'' if isinstance(own, dict) else ', and that this layer is not quantized'}; its tensors cannot be that."
        )
    return Groups(size, bits, mode)


def _weight(files: Files, layer: str, groups: Groups) -> EncodedWeight:
    name, scales = f"{layer}.weight", layer + SCALES
    words = files[require_part(files, name, (torch.uint32,))].meta(name)
    require_part(files, scales, FLOATS if groups.mode == _AFFINE else (torch.uint8,))
    grid = tuple(files[scales].meta(scales).shape)
    fits = words.ndim >= 2 and len(grid) == words.ndim and grid[:-1] == tuple(words.shape[:-1])
    if not fits or 32 * words.shape[-1] != grid[-1] * groups.size * groups.bits:
        raise FormatError(
            f"{name}: words of shape {tuple(words.shape)} beside scales of {grid} do not hold groups of "
            f"{groups.size} in {groups.bits} bits, as config.json says."
        )
    parts = {CODES: name, "scale": scales}
    if groups.mode == _AFFINE:
        parts["bias"] = require_part(files, layer + BIASES, FLOATS, grid)
    shape = (*grid[:-1], grid[-1] * groups.size)
    return EncodedWeight(name, parts, shape, partial(_decode, layer, groups, shape[-1]))


def _decode(layer: str, groups: Groups, columns: int, parts: Tensors) -> Rows:
    codes = parts[CODES].flatten(0, -2).view(torch.uint8)
    stored = parts["scale"].view(torch.float8_e4m3fn) if groups.mode == "nvfp4" else parts["scale"]
    scale = scales(layer + SCALES, stored).flatten(0, -2)
    bias = scales(layer + BIASES, parts["bias"]).flatten(0, -2) if groups.mode == _AFFINE else None

    def rows(piece: slice) -> torch.Tensor:
        stored = codes[piece]
        if groups.mode == "mxfp8":
            values = stored.view(torch.float8_e4m3fn).float()
        else:
            values = unpack_bits(stored, groups.bits)[:, :columns]
            values = values.float() if groups.mode == _AFFINE else decode(values, DTYPES["fp4_e2m1"])
        grouped = values.reshape(len(values), -1, groups.size) * scale[piece, :, None]
        return (grouped if bias is None else grouped + bias[piece, :, None]).flatten(1)

    return rows
