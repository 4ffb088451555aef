"""The layers that a GGUF file takes, and how the parts of their weights lie in the bytes of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from quark.core.blocks.block_types import BlockType, block_values
from quark.core.quantize import fake_quantize
from quark.core.scales import QParams, exp2
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import ShapeError
from quark.gguf.block_bytes import Parts, pack_blocks, unpack_blocks
from quark.gguf.mixes import MIXES
from quark.gguf.types import BLOCK, HEAD, block_type, code_bytes, head_bytes, values_of
from quark.torch.formats.format import Format, only_weight
from quark.torch.formats.layout import CodedLayout, Layout, Tensors, rows_together
from quark.torch.formats.quark.layout import params_of_rows

PIECE = 1 << 20
"""Bytes of float32 that are turned into blocks at once."""


class GgufLayout(CodedLayout):
    """A matrix as rows of blocks: uint8 (O, I / 32 * bytes of a block), or (O, I) of a 16-bit type."""

    word_rows = 1

    def store(self, x: torch.Tensor, params: QParams | None, frozen: bool = False) -> Tensors:
        unit = None if x.is_meta or params is None else rows_together(self.spec, tuple(x.shape), 1)
        step = x.shape[0] if unit is None else max(unit, PIECE // (4 * x.shape[1]) // unit * unit)
        if step >= x.shape[0]:
            return self._store_rows(x, params, frozen)
        assert params is not None
        cuts = [slice(start, min(start + step, x.shape[0])) for start in range(0, x.shape[0], step)]
        parts = [self._store_rows(x[cut], self._params_of(params, cut, tuple(x.shape)), frozen)[""] for cut in cuts]
        return {"": torch.cat(parts)}

    def _params_of(self, params: QParams, rows: slice, shape: tuple[int, ...]) -> QParams:
        """Those of some rows."""
        second, own = params.second, params_of_rows(replace(params, second=None), self.spec, rows, shape)
        return own if second is None else replace(own, second=params_of_rows(second, self.spec, rows, shape))

    def _store_rows(self, x: torch.Tensor, params: QParams | None, frozen: bool) -> Tensors:
        kind = block_type(self.spec)
        assert kind is not None
        if self.spec.is_cast:
            return {"": fake_quantize(x, None, self.spec).to(getattr(torch, self.spec.dtype.torch))}
        assert params is not None
        if isinstance(self.spec.dtype, BlockType):
            return {"": self._store_block_type(x, params, frozen)}
        scale, zero = self._per_block(params.scale, x), self._per_block(params.zero_point, x)
        assert scale is not None
        head = head_bytes(kind, scale, zero)
        blocks = self.codes(x, params, frozen).reshape(*scale.shape, BLOCK)
        return {"": torch.cat([head, code_bytes(kind, blocks)], dim=-1).reshape(x.shape[0], -1)}

    def load(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        if self.spec.is_cast:
            return tensors[""].to(self.model_dtype)
        if isinstance(self.spec.dtype, BlockType):
            return self._load_block_type(tensors[""], self.spec.dtype, shape).to(self.model_dtype)
        kind = block_type(self.spec)
        assert kind is not None
        head, rest = self._blocks(tensors[""], shape)
        return values_of(kind, head, rest).reshape(shape).to(self.model_dtype)

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
        parts = self._unpacked(stored, dtype, shape)
        scale, minimum = parts["d"], parts.get("e")
        if dtype.scales is not None:
            scale, minimum = scale * parts["c"], None if minimum is None else minimum * parts["k"]
        codes = torch.unflatten(parts["q"], -1, (dtype.groups, dtype.group))
        minimum = None if minimum is None else minimum[..., None]
        values: torch.Tensor = block_values(codes, scale[..., None], minimum)
        return values.reshape(shape)

    def load_codes(self, stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if isinstance(self.spec.dtype, BlockType):
            return self._unpacked(stored, self.spec.dtype, shape)["q"].reshape(shape)
        kind, rest = block_type(self.spec), self._blocks(stored, shape)[1]
        assert kind is not None
        # Under a scale of one, values are codes.
        one = torch.tensor([127], dtype=torch.uint8) if kind == "MXFP4" else torch.ones(1).half().view(torch.uint8)
        head = one.to(rest.device)
        return values_of(kind, head.expand(*rest.shape[:-1], -1).contiguous(), rest).reshape(shape)

    def load_params(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> QParams:
        if isinstance(self.spec.dtype, BlockType):
            parts = self._unpacked(tensors[""], self.spec.dtype, shape)
            flat = {name: part.reshape(shape[0], -1) for name, part in parts.items()}
            if self.spec.dtype.scales is None:
                return QParams(flat["d"], flat.get("e"))
            return QParams(flat["c"], flat.get("k"), QParams(flat["d"], flat.get("e")))
        head = self._blocks(tensors[""], shape)[0]
        if block_type(self.spec) == "MXFP4":
            return QParams(exp2(head[..., 0].to(torch.int32) - 127))
        scale = head.view(torch.float16)[..., 0].float()
        return QParams(scale, torch.zeros_like(scale) if self.spec.has_zero_point else None)

    def _unpacked(self, stored: torch.Tensor, dtype: BlockType, shape: tuple[int, ...]) -> Parts:
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
    """The format of GGUF files: weights alone, in blocks of 32."""

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
