"""Folders that torchao quantized, as its safetensors files flatten a tensor of its classes.

    Int8Tensor, IntxUnpackedToInt8Tensor    w = (code - zero) * scale           int8, blocks of any shape
    Float8Tensor                            w = code * scale                    float8
    Int4Tensor                              w = code * scale + zero             -8 to 7, two in a byte, the lower bits
                                                                                first; scale, zero: (groups, rows)

The metadata of a file hold the class of each tensor and its attributes as JSON. The parts of `layer.weight` are called
`layer._weight_qdata`, `layer._weight_scale` and so on; torchao 0.14 called them `layer.weight:qdata`, and what it did
not quantize `layer.bias:_data`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quark.base.json_objects import plain_json
from quark.errors import FormatError, NotSupportedError, one_line
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

NAMES, KIND, ATTRIBUTES = "tensor_names", "_type", "_data"
PLAIN = "Tensor"
"""Class of what is not quantized."""
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
BYTES = (torch.int8, torch.uint8)
INT4 = "Int4Tensor"
_CODE_TYPES = {
    "Int8Tensor": (torch.int8,),
    "IntxUnpackedToInt8Tensor": (torch.int8,),
    "Float8Tensor": _FLOAT8,
    INT4: BYTES,
}
"""Class -> dtypes of its codes."""
_OF_INPUTS = ("act_quant_scale", "act_quant_zero_point")
"""Scales of inputs, which are passed over."""
_BEFORE_INPUTS = "act_pre_scale"
"""Factors of inputs; a weight that has them is that of no float model."""
_ROLES = ("qdata", "scale", "zero_point", "scale_and_zero", _BEFORE_INPUTS, *_OF_INPUTS, ATTRIBUTES)
"""The parts that a tensor may be stored in."""


def encoded_weights(files: Files, quantization: dict[str, Any]) -> list[EncodedWeight]:
    """The tensors that the metadata name, in either spelling. Raises as `Encoding` says."""
    made = []
    for name, row in _described(files).items():
        kind, attributes, (parent, _, leaf) = row.get(KIND), row.get(ATTRIBUTES), name.rpartition(".")
        spelled = {role: (f"{parent}._{leaf}_{role}", f"{name}:{role}") for role in _ROLES}
        parts = {role: part for role, known in spelled.items() for part in known if part in files}
        if kind == PLAIN:
            made += [_float_tensor(files, name, parts[ATTRIBUTES])] if ATTRIBUTES in parts else []
        elif kind in _CODE_TYPES:
            made.append(_weight(files, name, kind, attributes if isinstance(attributes, dict) else {}, parts))
        else:
            raise NotSupportedError(
                f"{name} is of torchao's class {kind!r:.60}, whose layout is not read. Possible: "
                f"{', '.join(_CODE_TYPES)}, or the model that it was made from."
            )
    return made


def _described(files: Files) -> dict[str, dict[str, Any]]:
    """Name of a float tensor -> its class and attributes, as the metadata of the files say."""
    rows: dict[str, dict[str, Any]] = {}
    for file in dict.fromkeys(files.values()):
        names = _json(file.path, NAMES, file.metadata.get(NAMES, "[]"))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise FormatError(f"{file.path}: {NAMES} in its metadata is {names!r:.80}, not a list of names.")
        for name in names:
            row = _json(file.path, name, file.metadata.get(name, ""))
            if not isinstance(row, dict):
                raise FormatError(f"{file.path}: its metadata say {row!r:.80} of {name}, not an object.")
            rows[name] = row
    return rows


def _json(path: Path, name: str, text: str) -> Any:
    try:
        return plain_json(text)
    except ValueError as error:
        raise FormatError(f"{path}: what its metadata say of {name:.200} is not JSON: {one_line(error)}.") from None


def _float_tensor(files: Files, name: str, part: str) -> EncodedWeight:
    """A float tensor under the name that torchao 0.14 gave it."""
    require_part(files, part, (*FLOATS, torch.float64))
    shape = tuple(files[part].meta(part).shape)

    def decoder(parts: Tensors) -> Rows:
        values = parts[CODES] if len(shape) > 1 else scales(name, parts[CODES])
        return lambda piece: values.reshape(-1, shape[-1] if shape else 1)[piece].float()

    return EncodedWeight(name, {CODES: part}, shape, decoder)


def _weight(
    files: Files, name: str, kind: str, attributes: Mapping[str, Any], parts: Mapping[str, str]
) -> EncodedWeight:
    if _BEFORE_INPUTS in parts:
        raise NotSupportedError(
            f"{name} is stored for inputs that are scaled ({_BEFORE_INPUTS}), and is the weight of no float model. "
            "Possible: the model that it was made from."
        )
    if missing := [role for role in ("qdata", "scale", *(["zero_point"] if kind == INT4 else [])) if role not in parts]:
        raise FormatError(f"The checkpoint has no {missing[0]} of {name}, which its metadata name.")
    codes = files[require_part(files, parts["qdata"], _CODE_TYPES[kind])].meta(parts["qdata"])
    if codes.ndim < 2:
        raise FormatError(f"{parts['qdata']} has shape {tuple(codes.shape)}; a weight has two axes or more.")
    shape = (*codes.shape[:-1], codes.shape[-1] * (2 if kind == INT4 else 1))
    if kind == INT4 and list(shape) != attributes.get("shape", list(shape)):
        raise FormatError(f"{parts['qdata']} holds a weight of {shape}; the metadata say {attributes['shape']!r:.80}.")
    grid = _grid(files, name, shape, attributes.get("block_size"), parts["scale"])
    _require_grid(files, parts["scale"], FLOATS, grid, kind)
    if "zero_point" in parts:
        _require_grid(files, parts["zero_point"], FLOATS if kind == INT4 else (torch.int8, torch.int32), grid, kind)
    named = {CODES if role == "qdata" else role: part for role, part in parts.items()}
    return EncodedWeight(name, named, shape, partial(_decode, name, kind, shape, grid, _range(name, attributes)))


def _require_grid(files: Files, part: str, dtypes: Collection[torch.dtype], grid: tuple[int, ...], kind: str) -> None:
    """Raise FormatError for scales or zero points that are not one for each block; a single one may have any shape."""
    stored = (*grid[:-2], grid[-1], grid[-2]) if kind == INT4 else grid
    there = tuple(files[require_part(files, part, dtypes)].meta(part).shape)
    if there != stored and not (kind != INT4 and math.prod(grid) == 1 == math.prod(there)):
        raise FormatError(f"{part} has shape {there}; the blocks of its weight need {stored}.")


def _grid(files: Files, name: str, shape: tuple[int, ...], block: Any, scale: str) -> tuple[int, ...]:
    """How many scales there are along each axis. Raises FormatError where the blocks do not fit the weight."""
    if block is None:  # Float8Tensor may leave it out
        there = tuple(files[require_part(files, scale, FLOATS)].meta(scale).shape)
        grid = there if math.prod(there) > 1 else (1,) * len(shape)
        block = [size // max(1, count) for size, count in zip(shape, grid, strict=False)]
    known = (
        isinstance(block, list) and len(block) == len(shape) and all(type(size) is int and size > 0 for size in block)
    )
    if not known or any(size % step for size, step in zip(shape, block, strict=True)):
        raise FormatError(f"{name}: blocks of {block!r:.80} do not fit a weight of {shape}.")
    return tuple(size // step for size, step in zip(shape, block, strict=True))


def _range(name: str, attributes: Mapping[str, Any]) -> tuple[int, int] | None:
    """The smallest and the greatest code of an integer type that a tensor names; None: it names none."""
    target = attributes.get("target_dtype")
    if target is None:
        return None
    match = re.fullmatch(r"int([1-8])", str(target.get(ATTRIBUTES) if isinstance(target, dict) else target))
    if match is None:
        raise NotSupportedError(f"{name}: codes of torchao in {target!r:.80} are not read. Possible: int1 to int8.")
    return -(1 << (int(match[1]) - 1)), (1 << (int(match[1]) - 1)) - 1


def _decode(
    name: str, kind: str, shape: tuple[int, ...], grid: tuple[int, ...], limits: tuple[int, int] | None, parts: Tensors
) -> Rows:
    codes = parts[CODES].flatten(0, -2)
    if limits and codes.numel() and not limits[0] <= int(codes.min()) <= int(codes.max()) <= limits[1]:
        raise FormatError(f"{name} cannot be read: it has codes outside of {limits[0]} to {limits[1]}.")
    scale, zero = (
        None if role not in parts else _matrix(scales(f"{name} ({role})", parts[role]), grid, kind == INT4)
        for role in ("scale", "zero_point")
    )
    assert scale is not None
    row_of, width = torch.arange(math.prod(grid[:-1])).reshape(grid[:-1]), shape[-1] // grid[-1]
    for axis, (size, count) in enumerate(zip(shape[:-1], grid[:-1], strict=True)):
        row_of = row_of.repeat_interleave(size // count, axis)
    row_of = row_of.flatten()  # the row of scales of each row of the weight

    def spread(x: torch.Tensor, piece: slice) -> torch.Tensor:
        return x[row_of[piece]].repeat_interleave(width, 1)

    def rows(piece: slice) -> torch.Tensor:
        if kind == INT4:
            assert zero is not None
            packed = codes[piece].view(torch.uint8)  # two integers with a sign in each byte
            halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).float()
            return torch.where(halves > 7, halves - 16, halves) * spread(scale, piece) + spread(zero, piece)
        values = codes[piece].float()
        return (values if zero is None else values - spread(zero, piece)) * spread(scale, piece)

    return rows


def _matrix(x: torch.Tensor, grid: tuple[int, ...], turned: bool) -> torch.Tensor:
    """Scales or zero points with all axes but the last as one; `turned`: the last two are stored the other way."""
    return (x.transpose(-1, -2) if turned else x).reshape(-1, grid[-1])
