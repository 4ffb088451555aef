"""How the numbers of a block lie in its bytes, for the block types that hold their own scales.

A row lists the fields of a block in order (the structs of ggml-common.h). Codes lie in bit planes: a field of `bits`
bits and runs of `run` values takes 8 / bits runs at a time and puts the first in the lowest bits, the next above it:

    byte[j] = v[j] | v[run + j] << bits | v[2 run + j] << 2 bits ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quark.core.blocks.block_types import BLOCK_TYPES, BlockType

Parts = dict[str, torch.Tensor]
"""The numbers of blocks, (..., n) each, int32: "q" codes, "c" and "k" of the groups; "d" and "e" float32, n = 1."""


@dataclass(frozen=True)
class Planes:
    """Bits of some numbers in planes.

    Attributes:
        of: Names of the parts, one after the other.
        bits: Bits of a number in this field.
        run: Length of the runs.
        shift: The lowest of these bits in the number.
    """

    of: str
    bits: int
    run: int
    shift: int = 0

    def bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of this field in a block."""
        return sum(sizes[name] for name in self.of) * self.bits // 8

    def pack(self, parts: Parts) -> torch.Tensor:
        """The bytes, uint8 (..., n)."""
        numbers = torch.cat([parts[name] for name in self.of], -1) >> self.shift & ((1 << self.bits) - 1)
        runs = numbers.reshape(*numbers.shape[:-1], -1, 8 // self.bits, self.run)
        return (runs << self._places(numbers)).sum(-2).to(torch.uint8).flatten(-2)

    def unpack(self, stored: torch.Tensor, sizes: Mapping[str, int], parts: Parts) -> None:
        """Add these bits to the parts."""
        runs = stored.int().reshape(*stored.shape[:-1], -1, 1, self.run) >> self._places(stored)
        numbers = ((runs & ((1 << self.bits) - 1)) << self.shift).flatten(-3)
        for name, part in zip(self.of, torch.split(numbers, [sizes[name] for name in self.of], -1), strict=True):
            parts[name] = parts[name] + part if name in parts else part

    def _places(self, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(0, 8, self.bits, device=like.device, dtype=torch.int32).reshape(-1, 1)


@dataclass(frozen=True)
class Half:
    """A float16."""

    of: str

    def bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of this field in a block."""
        return 2

    def pack(self, parts: Parts) -> torch.Tensor:
        """The bytes, uint8 (..., 2)."""
        half = parts[self.of].to(torch.float16)
        return half.contiguous().view(torch.uint8)

    def unpack(self, stored: torch.Tensor, sizes: Mapping[str, int], parts: Parts) -> None:
        """Add the number to the parts."""
        parts[self.of] = stored.contiguous().view(torch.float16).float()


class SixBits:
    """Eight c and eight k of 6 bits in 12 bytes: whole those of the first four groups, in halves the others."""

    def bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of this field in a block."""
        return 12

    def pack(self, parts: Parts) -> torch.Tensor:
        """The bytes, uint8 (..., 12)."""
        (c, high_c), (k, high_k) = (torch.split(parts[name], 4, -1) for name in "ck")
        rest = (high_c & 15) | (high_k & 15) << 4
        return torch.cat([c | (high_c >> 4) << 6, k | (high_k >> 4) << 6, rest], -1).to(torch.uint8)

    def unpack(self, stored: torch.Tensor, sizes: Mapping[str, int], parts: Parts) -> None:
        """Add the numbers to the parts."""
        first, second, rest = torch.split(stored.int(), 4, -1)
        parts["c"] = torch.cat([first & 63, rest & 15 | (first >> 6) << 4], -1)
        parts["k"] = torch.cat([second & 63, rest >> 4 | (second >> 6) << 4], -1)


Field = Planes | Half | SixBits
FIELDS: dict[str, tuple[Field, ...]] = {
    "q4_0": (Half("d"), Planes("q", 4, 16)),
    "q4_1": (Half("d"), Half("e"), Planes("q", 4, 16)),
    "q5_0": (Half("d"), Planes("q", 1, 1, 4), Planes("q", 4, 16)),
    "q5_1": (Half("d"), Half("e"), Planes("q", 1, 1, 4), Planes("q", 4, 16)),
    "q8_0": (Half("d"), Planes("q", 8, 32)),
    "iq4_nl": (Half("d"), Planes("q", 4, 16)),
    "q2_k": (Planes("ck", 4, 16), Planes("q", 2, 32), Half("d"), Half("e")),
    "q3_k": (Planes("q", 1, 32, 2), Planes("q", 2, 32), Planes("c", 4, 8), Planes("c", 2, 4, 4), Half("d")),
    "q4_k": (Half("d"), Half("e"), SixBits(), Planes("q", 4, 32)),
    "q5_k": (Half("d"), Half("e"), SixBits(), Planes("q", 1, 32, 4), Planes("q", 4, 32)),
    "q6_k": (Planes("q", 4, 64), Planes("q", 2, 32, 4), Planes("c", 8, 16), Half("d")),
    "iq4_xs": (Half("d"), Planes("c", 2, 1, 4), Planes("c", 4, 1), Planes("q", 4, 16)),
}
"""Block type -> its fields, in order."""


def pack_blocks(parts: Parts, dtype: BlockType) -> torch.Tensor:
    """The bytes of blocks.

    Args:
        parts: (..., blocks, n) each, as the type has them: codes and levels as they count, so of signed ones negative.
        dtype: The type.

    Returns:
        uint8 (..., blocks, bytes of a block).
    """
    stored = dict(parts)
    if dtype.values:
        values = torch.tensor(dtype.values, dtype=parts["q"].dtype, device=parts["q"].device)
        stored["q"] = torch.bucketize(parts["q"].contiguous(), values).int()
    else:
        stored["q"] = parts["q"].int() if dtype.bits == 8 else (parts["q"] - dtype.min).int()
    if "c" in stored and dtype.name != "q6_k":  # the int8 of Q6_K keep their sign
        stored["c"] = stored["c"].int() - _lowest(dtype)
    stored |= {name: stored[name].int() for name in "ck" if name in stored}
    if dtype.has_minimum and dtype.scales is None:
        stored["e"] = -stored["e"]  # of one level, m is stored as what is added
    return torch.cat([field.pack(stored) for field in FIELDS[dtype.name]], -1)


def unpack_blocks(stored: torch.Tensor, dtype: BlockType) -> Parts:
    """Inverse of `pack_blocks`: float32 (..., blocks, n) each."""
    sizes, parts, start = {"q": dtype.block, "c": dtype.groups, "k": dtype.groups}, Parts(), 0
    for field in FIELDS[dtype.name]:
        stop = start + field.bytes(sizes)
        field.unpack(stored[..., start:stop], sizes, parts)
        start = stop
    q = parts["q"]
    if dtype.values:
        parts["q"] = torch.tensor(dtype.values, dtype=torch.float32, device=q.device)[q.long()]
    else:
        parts["q"] = (torch.where(q > 127, q - 256, q) if dtype.bits == 8 else q + int(dtype.min)).float()
    if "c" in parts:
        c = parts["c"]
        parts["c"] = (torch.where(c > 127, c - 256, c) if dtype.name == "q6_k" else c + _lowest(dtype)).float()
    if "k" in parts:
        parts["k"] = parts["k"].float()
    if dtype.has_minimum and dtype.scales is None:
        parts["e"] = -parts["e"]
    return parts


def halves_of(dtype: BlockType) -> list[int]:
    """Where the float16 numbers of a block begin in its bytes."""
    sizes, starts, start = {"q": dtype.block, "c": dtype.groups, "k": dtype.groups}, [], 0
    for field in FIELDS[dtype.name]:
        starts += [start] if isinstance(field, Half) else []
        start += field.bytes(sizes)
    return starts


def _lowest(dtype: BlockType) -> int:
    assert dtype.scales is not None
    return dtype.scales[0]


assert FIELDS.keys() == BLOCK_TYPES.keys()
