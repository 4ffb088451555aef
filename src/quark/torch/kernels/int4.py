"""4-bit groups: torch's `_weight_int4pack_mm_for_cpu`, bfloat16 inputs, float32 sums.

    torch's kernel:  y = sum over g of sum over k in g of x[k] * ((u[n, k] - 8) * scale[n, g] + offset[n, g])
    offset = (8 - zero) * scale, in bfloat16; what that rounding loses is added as  rest[n, g] * (sum of x in g)

Scales are exact where the model is bfloat16, whose scales are. The weight is not rounded to bfloat16 once more, as that
of a frozen layer is. The packed layout belongs to the CPU: `_Order` finds it by packing rows whose number is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from quark.torch.kernels.kernel import CodedWeight, Kernel, Multiply, Packed

GROUPS = (256, 128, 64, 32)
"""The groups that the kernel takes. Longer groups are cut into these, each with the scale of the whole."""

ROWS = 64
"""Weights are padded to a multiple of the longest block of rows that any CPU packs."""

BLOCKS = 2
"""How many blocks of rows are decoded at once, so that they stay in the cache: measured, 2 of 64."""


class Int4Groups(Kernel):
    """int4 and uint4 weights under scales of 32 inputs or a multiple of that."""

    name = "int4_groups"

    def fits(self, weight: CodedWeight) -> bool:
        return (
            weight.codes.device.type == "cpu"
            and weight.spec.dtype.name in ("int4", "uint4")
            and _kernel_group(weight.group) is not None
            and weight.fits_bfloat16()
        )

    def pack(self, weight: CodedWeight) -> dict[str, Any]:
        n = weight.shape[0]
        pad = -n % ROWS
        signed = 8 if weight.spec.dtype.signed else 0
        group = _kernel_group(weight.group)
        assert group is not None
        repeat = weight.group // group
        scale = weight.scale.repeat_interleave(repeat, 1)
        offset = torch.full_like(scale, 8 - signed)
        if weight.zero is not None:
            offset = offset - weight.zero.repeat_interleave(repeat, 1)
        offset *= scale
        rest = offset - offset.bfloat16().float()
        pairs = F.pad(torch.stack([scale, offset], -1), (0, 0, 0, 0, 0, pad)).bfloat16()
        return {
            "weight": _packed_codes(weight.codes, signed),
            "scale_and_offset": pairs.transpose(0, 1).contiguous(),
            "rest": rest.t().contiguous() if bool(rest.any()) else None,
            "signed": signed,
            "rows": n,
        }

    def codes(self, packed: Packed, shape: tuple[int, int]) -> torch.Tensor:
        order, k = _order(), shape[1]
        blocks = packed["weight"].reshape(-1, k, order.length // 2)
        both = torch.stack([blocks & 15, blocks >> 4], -1).flatten(2)[:, :, order.back]
        return both.transpose(1, 2).reshape(-1, k)[: shape[0]].float() - packed["signed"]

    def ways(self, input_quantizer: nn.Module | None) -> dict[str, Multiply]:
        return {"packed": _packed, "decoded": _decoded}


def _packed_codes(codes: torch.Tensor, signed: int) -> torch.Tensor:
    """The kernel's layout, some blocks of rows at a time, so that their int32 codes stay in the cache."""
    n, k = codes.shape
    out = torch.empty(n + -n % ROWS, k // 2, dtype=torch.uint8)
    for start in range(0, n, ROWS):
        block = codes[start : start + ROWS].to(torch.int32) + signed
        block = F.pad(block, (0, 0, 0, ROWS - len(block))) if len(block) < ROWS else block
        out[start : start + ROWS] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(block, 1).reshape(ROWS, -1)
    return out


def _packed(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    pairs = packed["scale_and_offset"]
    group = x.shape[1] // pairs.shape[0]
    y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.bfloat16().contiguous(), packed["weight"], group, pairs
    )
    return _with_rest(y[:, : packed["rows"]], x, packed["rest"])


def _with_rest(y: torch.Tensor, x: torch.Tensor, rest: torch.Tensor | None) -> torch.Tensor:
    """Y with what the rounding of the offsets lost."""
    if rest is None:
        return y.to(x.dtype)
    return torch.addmm(y.float(), _group_sums(x, rest.shape[0]), rest).to(x.dtype)


def _group_sums(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x.bfloat16().view(x.shape[0], groups, -1).sum(2, dtype=torch.float32)


def _decoded(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """For many rows: blocks of rows are decoded to bfloat16 while they are in the cache, and multiplied there."""
    order, pairs, rows = _order(), packed["scale_and_offset"], x.bfloat16()
    groups, k = pairs.shape[0], x.shape[1]
    count = pairs.shape[1] // order.length
    # (groups, n, 2) to (blocks, groups, 1, rows of a block, as their codes lie)
    scale, offset = pairs.unbind(-1)
    scales = scale.view(groups, count, order.length)[:, :, order.rows].transpose(0, 1).unsqueeze(2).contiguous()
    words = packed["weight"].view(count, -1).view(torch.uint16)
    out = torch.empty(count, x.shape[0], order.length, dtype=torch.bfloat16)
    for start in range(0, count, BLOCKS):
        blocks = slice(start, min(start + BLOCKS, count))
        index = words[blocks].reshape(-1).to(torch.int32)
        values = torch.index_select(_table(), 0, index).view(torch.bfloat16)
        weight = values.view(-1, groups, k // groups, order.length).mul_(scales[blocks])
        torch.matmul(rows, weight.view(-1, k, order.length), out=out[blocks])
    y = out[:, :, order.back].transpose(0, 1).reshape(x.shape[0], -1)
    if bool(offset.any()):
        y = torch.addmm(y.float(), _group_sums(x, groups), offset.float()).to(torch.bfloat16)
    return _with_rest(y[:, : packed["rows"]], x, packed["rest"])


@cache
def _table() -> torch.Tensor:
    """Four bfloat16 values u - 8, as one int64, for each 16 bits: four codes, the lowest bits first."""
    words = torch.arange(1 << 16)
    values = torch.stack([(words >> shift & 15) - 8 for shift in (0, 4, 8, 12)], -1)
    return values.bfloat16().view(torch.int64).view(-1)


@dataclass(frozen=True)
class _Order:
    """How this CPU packs codes: blocks of `length` rows, in each block one input after the other.

    Attributes:
        length: Rows of a block.
        rows: The row within its block of each code of an input, low half of a byte first.
        back: The place of each row among the codes.
    """

    length: int
    rows: torch.Tensor
    back: torch.Tensor


@cache
def _order() -> _Order:
    """The order of this CPU, from packing the numbers of rows, one hexadecimal digit at a time."""
    inputs = 64
    number = torch.arange(ROWS, dtype=torch.int32)[:, None].expand(ROWS, inputs).contiguous()
    digits = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(number >> s & 15, 1).flatten() for s in (0, 4)]
    halves = [torch.stack([digit & 15, digit >> 4], -1).flatten().long() for digit in digits]
    rows = halves[0] + 16 * halves[1]
    # The first quarter of all codes holds every row of the first block, and of no other.
    length = len(torch.unique(rows[: ROWS * inputs // 4]))
    order = rows[:length].clone()
    return _Order(length, order, order.argsort())


def _kernel_group(group: int) -> int | None:
    """The longest group of the kernel that divides `group`."""
    return next((size for size in GROUPS if math.gcd(size, group) == size), None)
