"""The tensors of the `gptq` format: integers of b bits, 2, 3, 4 or 8.

    qweight  int32 (I b/32, O)     codes from 0: each column is one stream of bits, first code in the lowest bits
    qzeros   int32 (G, O b/32)     zero points, each row such a stream; version 1 stores them minus one
    scales   (G, O)
    g_idx    int32 (I,)            group of each input
    W[o, i] = (qweight[i, o] - qzeros[g_idx[i], o]) * scales[g_idx[i], o]

The codes of a signed type are stored half the range higher. Version 1 has no place for the zero point 0: programs that
write one borrow from the next field of the word, or spoil the word; those that read it take it for 0 or for 2^b.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quark.core.granularity import PerGroup
from quark.core.quantize import dequantize
from quark.core.scales import QParams, flaw
from quark.core.spec import TensorSpec
from quark.errors import NotSupportedError
from quark.torch.formats.layout import CodedLayout, Tensors, float_scale_dtype, pack_words, unpack_words

_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""Bits -> a word with 1 in each field."""


@dataclass(frozen=True)
class Variant:
    """The differences between folders of the format.

    Attributes:
        version: 1: zero points are stored minus one; 2: as they are.
        ordered: Whether the groups are those of `g_idx` (desc_act), which is read then; else runs of inputs.
        borrows: Of version 1: whether a zero point of 0 has borrowed from the next field, as gptqmodel writes it.
        exact: Scales are float32, which holds those of every file.
    """

    version: int
    ordered: bool = False
    borrows: bool = False
    exact: bool = True


class GptqLayout(CodedLayout):
    """The layout of one weight.

    Args:
        spec, model_dtype, pack_method, real: See Layout; the format has one pack method.
        variant: How a folder has it; None: as it is written here.
    """

    def __init__(
        self,
        spec: TensorSpec,
        model_dtype: torch.dtype,
        pack_method: str = "reorder",
        real: bool = True,
        variant: Variant | None = None,
    ) -> None:
        super().__init__(spec, model_dtype, "reorder", real)
        self.variant = variant or Variant(1 if spec.symmetric else 2, exact=False)
        self.indexed = variant is None or variant.ordered

    @property
    def middle(self) -> int:
        """The stored code of 0 of a signed type, and the stored zero point of a symmetric one."""
        return int(1 << (self.spec.dtype.bits - 1))

    def store(self, x: torch.Tensor, params: QParams | None, frozen: bool = False) -> Tensors:
        assert params is not None
        spec, bits = self.spec, self.spec.dtype.bits
        codes = (self.codes(x, params, frozen) - spec.dtype.min).to(torch.uint8)
        out = {"": pack_words(codes, bits).t().contiguous(), **self.store_params(params)}
        return {**out, **{suffix: index.to(x.device) for suffix, index in self.constants(tuple(x.shape)).items()}}

    def constants(self, shape: tuple[int, ...]) -> Tensors:
        if not self.indexed:
            return {}
        return {"g_idx": torch.arange(shape[1], dtype=torch.int32) // self._columns(shape[1])}

    def store_params(self, params: QParams) -> Tensors:
        scale = params.scale.reshape(params.scale.shape[0], -1)
        zero = torch.zeros_like(scale) if params.zero_point is None else params.zero_point.reshape(scale.shape)
        fields = (zero - self.spec.dtype.min - self._less).to(torch.uint8)
        return {
            "scale": scale.to(self.scale_dtype()).t().contiguous(),
            "zero_point": pack_words(fields.t(), self.spec.dtype.bits),
        }

    def load(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        codes, params = self.load_codes(tensors[""], shape), self._params_of_groups(tensors, shape)
        if not self.variant.ordered:
            return dequantize(codes, self._as_split(params, shape), self.spec).to(self.model_dtype)
        group = tensors["g_idx"].long()
        values = codes if params.zero_point is None else codes - params.zero_point[:, group]
        return (values * params.scale[:, group]).to(self.model_dtype)

    def load_codes(self, stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return unpack_words(stored.t(), self.spec.dtype.bits, shape[1]).float() + self.spec.dtype.min

    def load_params(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> QParams:
        """Scale and zero point of a weight of `shape`.

        Raises:
            NotSupportedError: Its groups are no runs of inputs.
        """
        if self.variant.ordered:
            runs = torch.arange(shape[1], device=tensors["g_idx"].device) // self._columns(shape[1])
            if not torch.equal(tensors["g_idx"].long(), runs):
                raise NotSupportedError(
                    "The groups of this gptq weight are not consecutive inputs (desc_act), so no other format fits. "
                    "Possible: use it as it is, or quantize its values again (quark convert --requantize)."
                )
        return self._as_split(self._params_of_groups(tensors, shape), shape)

    def flaw(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> str | None:
        bits, groups = self.spec.dtype.bits, tensors["scale"].shape[0]
        if self.variant.ordered and not bool(((tensors["g_idx"] >= 0) & (tensors["g_idx"] < groups)).all()):
            least, most = int(tensors["g_idx"].min()), int(tensors["g_idx"].max())
            return f"g_idx holds {least} to {most}, and there are {groups} groups"
        top = (1 << bits) - 1
        fields = unpack_words(tensors["zero_point"], bits, shape[0])
        if self.variant.version == 1 and not self._borrows and bool((fields == top).any()):
            return (
                f"qzeros hold {top}: a zero point of 0 less one, which programs read as 0 or as {top + 1}. "
                "Possible: the model in checkpoint_format gptq_v2"
            )
        params = self._params_of_groups(tensors, shape)
        if self.spec.symmetric and not bool((fields == self.middle - self._less).all()):
            return f"qzeros are not {self.middle - self._less} everywhere, as they are of sym=true in this version"
        return flaw(params, self.spec)

    def scale_dtype(self) -> torch.dtype:
        """Of a stored scale."""
        return torch.float32 if self.variant.exact else float_scale_dtype(self.spec.scale_type, self.model_dtype)

    @property
    def _less(self) -> int:
        """The number that a stored zero point is less by."""
        return 1 if self.variant.version == 1 else 0

    @property
    def _borrows(self) -> bool:
        """True where the words of zero points, as integers, are those of version 2 less 1 in each field."""
        return self.variant.borrows and self.spec.dtype.bits in _ONES

    def _columns(self, inputs: int) -> int:
        """Inputs in a group."""
        split = self.spec.granularity
        return split.split(inputs)[1] if isinstance(split, PerGroup) else max(1, inputs)

    def _params_of_groups(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> QParams:
        """Scale and zero point as (O, G)."""
        bits, words = self.spec.dtype.bits, tensors["zero_point"]
        scale = tensors["scale"].t().float().contiguous()
        if self.spec.symmetric:
            middle = 0 if self.spec.dtype.signed else self.middle
            return QParams(scale, torch.full_like(scale, middle))
        # Of int32, so that what is carried out of the word is lost.
        less = 0 if self._borrows else self._less
        fields = unpack_words(words + _ONES[bits] if self._borrows else words, bits, shape[0])
        return QParams(scale, (fields.t().float() + (less + self.spec.dtype.min)).contiguous())

    def _as_split(self, params: QParams, shape: tuple[int, ...]) -> QParams:
        """Scales and zero points in the shape that the spec gives to scales."""
        split = self.spec.split.scale_shape(shape)
        zero = params.zero_point
        return QParams(params.scale.reshape(split), None if zero is None else zero.reshape(split))
