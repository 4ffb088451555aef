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

from collections.abc import Mapping

import torch
from torch import nn

from quark.core.block_types import BLOCK_TYPES, BlockType, block_values
from quark.core.dtypes import DTYPES
from quark.core.granularity import Granularity, PerBlock, PerChannel, PerGroup, PerTensor
from quark.core.packing import decode, encode
from quark.core.quantize import fake_quantize
from quark.core.scales import QParams, exp2, exponent
from quark.core.spec import LayerSpec, ScaleType, TensorSpec, block_spec
from quark.core.spec import spec as make_spec
from quark.errors import NonFiniteError, ShapeError
from quark.torch.config.block_mixes import MIXES
from quark.torch.formats.format import Format, only_weight
from quark.torch.formats.layout import CodedLayout, Layout, Tensors
from quark.torch.writers.gguf.block_bytes import Parts, pack_blocks, unpack_blocks

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
    """Whether values that share a scale are whole blocks, in rows of a whole number of blocks."""
    if isinstance(split, PerGroup):
        return split.axis in (-1, 1) and (split.size == -1 or split.size % BLOCK == 0)
    if isinstance(split, PerBlock):
        return split.size[1] % BLOCK == 0
    return isinstance(split, PerTensor) or split == PerChannel(0)


class GgufLayout(CodedLayout):
    """A matrix as rows of blocks: uint8 (O, I / 32 * bytes of a block), or (O, I) of a 16-bit type."""

    def store(self, x: torch.Tensor, params: QParams | None, frozen: bool = False) -> Tensors:
        kind = block_type(self.spec)
        assert kind is not None
        if self.spec.is_cast:
            return {"": fake_quantize(x, None, self.spec).to(getattr(torch, self.spec.dtype.torch))}
        assert params is not None
        if isinstance(self.spec.dtype, BlockType):
            return {"": self._store_block_type(x, params, frozen)}
        scale, zero = self._per_block(params.scale, x), self._per_block(params.zero_point, x)
        assert scale is not None
        head = _head(kind, scale, zero)
        blocks = self.codes(x, params, frozen).reshape(*scale.shape, BLOCK)
        return {"": torch.cat([head, _code_bytes(kind, blocks)], dim=-1).reshape(x.shape[0], -1)}

    def load(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        if self.spec.is_cast:
            return tensors[""].to(self.model_dtype)
        if isinstance(self.spec.dtype, BlockType):
            return self._load_block_type(tensors[""], self.spec.dtype, shape).to(self.model_dtype)
        kind = block_type(self.spec)
        assert kind is not None
        head, rest = self._blocks(tensors[""], shape)
        return _values(kind, head, rest).reshape(shape).to(self.model_dtype)

    def _store_block_type(self, x: torch.Tensor, params: QParams, frozen: bool) -> torch.Tensor:
        dtype = self.spec.dtype
        assert isinstance(dtype, BlockType)
        two, second = dtype.scales is not None, params.second
        found = {"q": self.codes(x, params, frozen), "c" if two else "d": params.scale}
        found |= {} if params.zero_point is None else {"k" if two else "e": params.zero_point}
        if second is not None:
            found |= {"d": second.scale} | ({} if second.zero_point is None else {"e": second.zero_point})
        blocks = (x.shape[0], x.shape[1] // dtype.block, -1)
        return pack_blocks({name: part.reshape(blocks) for name, part in found.items()}, dtype).flatten(1)

    def _load_block_type(self, stored: torch.Tensor, dtype: BlockType, shape: tuple[int, ...]) -> torch.Tensor:
        parts = self._parts(stored, dtype, shape)
        scale, minimum = parts["d"], parts.get("e")
        if dtype.scales is not None:
            scale, minimum = scale * parts["c"], None if minimum is None else minimum * parts["k"]
        codes = torch.unflatten(parts["q"], -1, (dtype.groups, dtype.group))
        minimum = None if minimum is None else minimum[..., None]
        values: torch.Tensor = block_values(codes, scale[..., None], minimum)
        return values.reshape(shape)

    def load_codes(self, stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if isinstance(self.spec.dtype, BlockType):
            return self._parts(stored, self.spec.dtype, shape)["q"].reshape(shape)
        kind, rest = block_type(self.spec), self._blocks(stored, shape)[1]
        assert kind is not None
        # Under a scale of one, values are codes.
        one = torch.tensor([127], dtype=torch.uint8) if kind == "MXFP4" else torch.ones(1).half().view(torch.uint8)
        head = one.to(rest.device)
        return _values(kind, head.expand(*rest.shape[:-1], -1).contiguous(), rest).reshape(shape)

    def load_params(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> QParams:
        if isinstance(self.spec.dtype, BlockType):
            parts = self._parts(tensors[""], self.spec.dtype, shape)
            flat = {name: part.reshape(shape[0], -1) for name, part in parts.items()}
            if self.spec.dtype.scales is None:
                return QParams(flat["d"], flat.get("e"))
            return QParams(flat["c"], flat.get("k"), QParams(flat["d"], flat.get("e")))
        head = self._blocks(tensors[""], shape)[0]
        if block_type(self.spec) == "MXFP4":
            return QParams(exp2(head[..., 0].to(torch.int32) - 127))
        scale = head.view(torch.float16)[..., 0].float()
        return QParams(scale, torch.zeros_like(scale) if self.spec.has_zero_point else None)

    def _parts(self, stored: torch.Tensor, dtype: BlockType, shape: tuple[int, ...]) -> Parts:
        return unpack_blocks(stored.reshape(shape[0], shape[1] // dtype.block, -1), dtype)

    def _blocks(self, stored: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes before the codes, and those of the codes, of blocks of one level: (O, I / 32, n) each."""
        blocks, size = stored.reshape(shape[0], shape[1] // BLOCK, -1), HEAD[block_type(self.spec) or ""]
        return blocks[..., :size].contiguous(), blocks[..., size:].contiguous()

    def store_params(self, params: QParams) -> Tensors:
        """GGUF has no static activations, and `refusal` lets none come here."""
        return {}

    def _per_block(self, value: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
        """A scale or zero point, one for each block: (O, I / 32)."""
        if value is None:
            return None
        each: torch.Tensor = self.spec.split.to_elements(value, tuple(x.shape))
        return each[:, ::BLOCK].contiguous()


class GgufFormat(Format):
    """What a GGUF file takes: weights alone, in blocks of 32."""

    name = "gguf"

    def refusal(self, spec: LayerSpec) -> str | None:
        weight = only_weight(spec)
        return (
            None
            if weight is not None and block_type(weight)
            else f"anything but weights in its block types; here {spec}"
        )

    def possible(self) -> str:
        return f"{super().possible()} And, in `quark quantize` or `gguf_config`, the mixes {', '.join(MIXES)}."

    def refuse_layer(self, name: str, layer: nn.Module, spec: LayerSpec) -> None:
        """Linear layers and embeddings, in rows of whole blocks."""
        if not isinstance(layer, nn.Embedding) or self.refusal(spec):
            super().refuse_layer(name, layer, spec)
        weight: torch.Tensor = getattr(layer, "float_weight", layer.weight)  # type: ignore[arg-type]
        columns = weight.shape[1]
        if columns % BLOCK and not (spec.weight and spec.weight.is_cast):
            raise ShapeError(f"{name}: GGUF cuts a row into blocks of {BLOCK}; {columns} values leave a rest.")

    def make_layout(
        self, spec: TensorSpec, layer: LayerSpec, dtype: torch.dtype, pack_method: str, real: bool
    ) -> Layout:
        return GgufLayout(spec, dtype)


def _head(kind: str, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
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


def _code_bytes(kind: str, codes: torch.Tensor) -> torch.Tensor:
    if kind == "Q8_0":
        return codes.to(torch.int8).view(torch.uint8)
    bits = encode(codes, DTYPES["fp4_e2m1"]) if kind == "MXFP4" else (codes + 8 * (kind == "Q4_0")).to(torch.uint8)
    half = BLOCK // 2
    return bits[..., :half] | (bits[..., half:] << 4)


def _values(kind: str, head: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    if kind == "Q8_0":
        return head.view(torch.float16).float() * rest.view(torch.int8).float()
    codes = torch.cat([rest & 15, rest >> 4], dim=-1)
    if kind == "MXFP4":
        return exp2(head.to(torch.int32) - 127) * decode(codes, DTYPES["fp4_e2m1"])
    params = head.view(torch.float16).float()
    if kind == "Q4_0":
        return params * (codes.float() - 8)
    return params[..., :1] * codes.float() + params[..., 1:]
