"""Folders that bitsandbytes quantized.

nf4, fp4        w[i] = table[code[i]] * absmax[i // blocksize], of the flattened weight; two codes in a byte, the first
                in its higher bits
twice           absmax[b] = map[code[b]] * absmax_2[b // blocksize_2] + offset
LLM.int8        w[i, j] = code[i, j] * SCB[i] / 127
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from quark.base.json_objects import plain_json
from quark.errors import FormatError, NotSupportedError, one_line
from quark.torch.checkpoint.sources.decode import scales
from quark.torch.checkpoint.sources.encoded import CODES, EncodedWeight, Files, Rows, Tensors, require_part

TABLES = {
    "nf4": torch.tensor([
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]),
    "fp4": torch.tensor([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4,
                         0, -1 / 192, -2 / 3, -1, -1 / 3, -1 / 2, -1 / 6, -1 / 4]),
}  # fmt: skip
"""Values by their codes, as the kernels have them; `quant_map` in a file repeats them."""
_STATE = re.compile(r"\.quant_state\.bitsandbytes__(\w+)$")
"""After the name of a weight in 4 bits: the JSON that describes it, and the name of its table."""
SCB, ROW_FORMAT = ".SCB", ".weight_format"
INT8 = torch.tensor(7.874015718698502e-3)
"""1 / 127, as the library multiplies by it."""
_STORAGE = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8)
"""Types that bytes of codes are labelled with, so that FSDP can shard them (`bnb_4bit_quant_storage`)."""
_NESTED = ("nested_blocksize", "nested_offset")


def encoded_weights(files: Files, quantization: dict[str, Any]) -> list[EncodedWeight]:
    """The weights in 4 bits and in LLM.int8. Raises as `Encoding` says."""
    found = []
    for name in files:
        if match := _STATE.search(name):
            found.append(_of_4_bits(files, name.removesuffix(match[0]), name, match[1]))
        elif name.endswith(SCB):
            found.append(_of_int8(files, name.removesuffix(SCB)))
    return found


def _of_4_bits(files: Files, name: str, state_name: str, table: str) -> EncodedWeight:
    if table not in TABLES:
        raise NotSupportedError(f"{name}: codes of bitsandbytes in {table!r} are not read. Possible: nf4, fp4, int8.")
    state = _state(files, state_name, table)
    shape, blocksize = tuple(state["shape"]), state["blocksize"]
    count = math.prod(shape)
    blocks = -(-count // blocksize)
    codes = files[require_part(files, name, _STORAGE)].meta(name)
    if codes.numel() * codes.element_size() != -(-count // 2):
        raise FormatError(f"{name} holds {codes.numel() * codes.element_size()} bytes, which are no weight of {shape}.")
    nested = "nested_absmax" if f"{name}.nested_absmax" in files else None
    if (nested is not None) != all(state.get(key) is not None for key in _NESTED):
        raise FormatError(f"{state_name} and the tensors beside it differ in whether scales are quantized, too.")
    kinds = {"absmax": ((torch.uint8 if nested else torch.float32,), (blocks,)), "quant_map": ((torch.float32,), (16,))}
    if nested:
        seconds = -(-blocks // state["nested_blocksize"])
        kinds |= {nested: ((torch.float32,), (seconds,)), "nested_quant_map": ((torch.float32,), (256,))}
    parts = {role: require_part(files, f"{name}.{role}", *kind) for role, kind in kinds.items()}
    decoder = partial(_decode_4_bits, name, table, state)
    return EncodedWeight(name, {CODES: name, **parts, "state": state_name}, shape, decoder)


def _state(files: Files, name: str, table: str) -> Mapping[str, Any]:
    """The JSON that describes a weight, checked. Raises FormatError where it cannot be one of bitsandbytes."""
    raw = files[require_part(files, name, (torch.uint8,))].read(name)
    try:
        state = plain_json(bytes(raw.flatten().tolist()))
    except ValueError as error:
        raise FormatError(f"{name} is not JSON: {one_line(error)}.") from None
    known: dict[str, Callable[[Any], bool]] = {
        "quant_type": lambda value: value == table,
        "blocksize": _is_size,
        "shape": lambda value: isinstance(value, list) and len(value) > 0 and all(map(_is_size, value)),
        "nested_blocksize": lambda value: value is None or _is_size(value),
        "nested_offset": lambda value: value is None or (isinstance(value, (int, float)) and math.isfinite(value)),
    }
    state = state if isinstance(state, dict) else {}
    wrong = next((key for key, is_right in known.items() if not is_right(state.get(key))), None)
    if wrong is not None:
        raise FormatError(f"{name} does not describe a weight: its {wrong} is {state.get(wrong)!r:.80}.")
    return state


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 40


def _decode_4_bits(name: str, table: str, state: Mapping[str, Any], parts: Tensors) -> Rows:
    if not torch.allclose(parts["quant_map"], TABLES[table], rtol=0, atol=1e-6):
        raise FormatError(f"{name}.quant_map is not the table of {table}.")
    absmax = _absmax(name, state, parts)
    packed, columns = parts[CODES].flatten().view(torch.uint8), state["shape"][-1]

    def rows(piece: slice) -> torch.Tensor:
        first, last = piece.start * columns, piece.stop * columns
        part = packed[first // 2 : -(-last // 2)]
        codes = torch.stack((part >> 4, part & 15), -1).flatten()[first % 2 :][: last - first]
        scale = absmax[torch.arange(first, last) // state["blocksize"]]
        return (TABLES[table][codes.long()] * scale).reshape(-1, columns)

    return rows


def _absmax(name: str, state: Mapping[str, Any], parts: Tensors) -> torch.Tensor:
    """The scale of each block, float32."""
    if "nested_absmax" not in parts:
        return scales(f"{name}.absmax", parts["absmax"])
    second = scales(f"{name}.nested_absmax", parts["nested_absmax"])
    values = scales(f"{name}.nested_quant_map", parts["nested_quant_map"])[parts["absmax"].long()]
    block = torch.arange(len(values)) // state["nested_blocksize"]
    return values * second[block] + state["nested_offset"]


def _of_int8(files: Files, layer: str) -> EncodedWeight:
    name = f"{layer}.weight"
    codes = files[require_part(files, name, (torch.int8,))].meta(name)
    if codes.ndim != 2:
        raise FormatError(f"{name} holds int8 of shape {tuple(codes.shape)}; LLM.int8 stores matrices.")
    parts = {CODES: name, "scale": require_part(files, layer + SCB, (torch.float32,), (codes.shape[0],))}
    order = layer + ROW_FORMAT
    if order in files:
        parts["format"] = require_part(files, order, (torch.uint8,))
        if files[order].meta(order).numel() != 1 or int(files[order].read(order)) != 0:
            raise NotSupportedError(f"{order} says that {name} lies in tiles of a GPU. Possible: rows (0).")
    return EncodedWeight(name, parts, tuple(codes.shape), partial(_decode_int8, layer))


def _decode_int8(layer: str, parts: Tensors) -> Rows:
    scale, codes = scales(layer + SCB, parts["scale"])[:, None], parts[CODES]
    return lambda piece: codes[piece].float() * scale[piece] * INT8
