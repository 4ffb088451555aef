"""The block types of GGUF. Each row of a matrix is cut into blocks of 32 values, stored one after the other.

    Q4_0    f16 d, 16 bytes                  y = d * (q - 8)
    Q4_1    f16 d, f16 m, 16 bytes           y = d * q + m
    Q8_0    f16 d, 32 int8                   y = d * q
    MXFP4   E8M0 byte e, 16 bytes            y = 2^(e - 127) * fp4(q)
    F32, F16, BF16                           values

Types whose scales were found for them (`BLOCK_TYPES`: Q2_K ... Q6_K, Q5_0, IQ4_XS ...) are decoded as block_types.py of
the core says, and lie in the file as block_bytes.py says.

The low nibbles of the 16 bytes are values 0 to 15 of the block, the high nibbles 16 to 31. A scale shared by more than
32 values along a row is repeated. d and m are rounded to float16: where the scale of the model is a float16 or
bfloat16 number in its range, d is that scale; m = -d * zero_point is at most 2^-11 of itself away.
"""

from __future__ import annotations

import torch

from quark.core.blocks.block_types import BLOCK_TYPES, BlockType
from quark.core.dtypes import DTYPES
from quark.core.granularity import Granularity, PerBlock, PerChannel, PerGroup, PerTensor
from quark.core.packing import decode, encode
from quark.core.scales import exp2, exponent
from quark.core.spec import ScaleType, TensorSpec, block_spec
from quark.core.spec import spec as make_spec
from quark.errors import NonFiniteError

BLOCK = 32
CASTS = {"float16": "F16", "bfloat16": "BF16"}
FLOAT_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
SPECS = {
    "Q4_0": make_spec("int4", PerGroup(-1, BLOCK), scale_type=ScaleType.float16),
    "Q8_0": make_spec("int8", PerGroup(-1, BLOCK), scale_type=ScaleType.float16),
    "MXFP4": make_spec("fp4_e2m1", PerGroup(-1, BLOCK), scale_type=ScaleType.float8_e8m0fnu, observer="block"),
}
"""Block type -> what a weight of this type in a file is, as a spec. The m of Q4_1 is no whole number of d."""
SPECS |= {name.upper(): block_spec(name) for name in BLOCK_TYPES if name.upper() not in SPECS}
HEAD = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2, "MXFP4": 1}
"""Block type -> bytes before its codes."""


def block_type(spec: TensorSpec) -> str | None:
    """The GGUF type that holds a weight of this spec; None if there is none."""
    if spec.is_cast:
        return CASTS[spec.dtype.name]
    if isinstance(spec.dtype, BlockType):
        return spec.dtype.name.upper()
    if not _whole_blocks(spec.granularity) or spec.scale_spec or spec.code_spec or spec.float_zero_point:
        return None
    if spec.scale_type is ScaleType.float8_e8m0fnu:
        return "MXFP4" if spec.dtype.name == "fp4_e2m1" else None
    return {("int4", True): "Q4_0", ("uint4", False): "Q4_1", ("int8", True): "Q8_0"}.get(
        (spec.dtype.name, spec.symmetric)
    )


def _whole_blocks(split: Granularity) -> bool:
    """Return True where values that share a scale are whole blocks, in rows of a whole number of blocks."""
    if isinstance(split, PerGroup):
        return split.axis in (-1, 1) and (split.size == -1 or split.size % BLOCK == 0)
    if isinstance(split, PerBlock):
        return split.size[1] % BLOCK == 0
    return isinstance(split, PerTensor) or split == PerChannel(0)


def head_bytes(kind: str, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """The bytes before the codes of each block: uint8 (O, I / 32, n)."""
    if kind == "MXFP4":
        return (exponent(scale) + 127).to(torch.uint8).unsqueeze(-1)
    parts = [scale.to(torch.float16)]
    if kind == "Q4_1":
        assert zero is not None
        # From the rounded scale, so that the code of 0.0 decodes as near to 0.0 as float16 goes.
        parts.append((-parts[0].float() * zero).to(torch.float16))
    head = torch.stack(parts, dim=-1)
    if not head.is_meta and not bool(torch.isfinite(head).all()):
        raise NonFiniteError("A scale is beyond the 65504 of float16, in which GGUF stores it.")
    return head.view(torch.uint8)


def code_bytes(kind: str, codes: torch.Tensor) -> torch.Tensor:
    """The bytes of the codes of each block: uint8 (O, I / 32, n)."""
    if kind == "Q8_0":
        return codes.to(torch.int8).view(torch.uint8)
    bits = encode(codes, DTYPES["fp4_e2m1"]) if kind == "MXFP4" else (codes + 8 * (kind == "Q4_0")).to(torch.uint8)
    half = BLOCK // 2
    return bits[..., :half] | (bits[..., half:] << 4)


def values_of(kind: str, head: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """The values of blocks, (O, I / 32, 32), of the bytes before their codes and those of the codes."""
    if kind == "Q8_0":
        return head.view(torch.float16).float() * rest.view(torch.int8).float()
    codes = torch.cat([rest & 15, rest >> 4], dim=-1)
    if kind == "MXFP4":
        return exp2(head.to(torch.int32) - 127) * decode(codes, DTYPES["fp4_e2m1"])
    params = head.view(torch.float16).float()
    if kind == "Q4_0":
        return params * (codes.float() - 8)
    return params[..., :1] * codes.float() + params[..., 1:]
