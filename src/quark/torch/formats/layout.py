"""Layout: how the tensors of one quantized weight lie in a file."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from quark.core.granularity import Granularity, PerBlock, PerChannel, PerGroup, PerTensor
from quark.core.packing import pack_bits, unpack_bits
from quark.core.quantize import quantize, recover_codes
from quark.core.scales import QParams
from quark.core.spec import ScaleType, TensorSpec

Tensors = dict[str, torch.Tensor]
"""Stored tensors by their suffix: "" is the tensor itself, then "scale", "zero_point", "scale_2", ..."""
WORD = 32
"""Bits of a word; after as many codes a packed row is at a whole word again, whatever their width."""


class Layout(ABC):
    """Stores codes and scales as named tensors, and reads them back.

    Args:
        spec: The spec of the tensor.
        model_dtype: dtype of the float tensor.
        pack_method: Order of 4-bit codes in a word: "reorder" (AWQ kernels) or "order".
        real: Store codes; False stores float values that were quantized.

    Attributes:
        word_rows: So many rows fill words, where codes or zero points of one column lie in words.
    """

    word_rows: ClassVar[int] = WORD

    def __init__(
        self, spec: TensorSpec, model_dtype: torch.dtype, pack_method: str = "reorder", real: bool = True
    ) -> None:
        self.spec = spec
        self.model_dtype = model_dtype
        self.pack_method = pack_method
        self.real = real

    def __eq__(self, other: object) -> bool:
        """Return True where both store equal tensors as equal ones."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self.spec, self.model_dtype, self.pack_method, self.real))

    def codes(self, x: torch.Tensor, params: QParams, frozen: bool) -> torch.Tensor:
        """The codes of x, as floats that hold their values; `frozen` says that x holds quantized values already."""
        codes: torch.Tensor = quantize(x, params, self.spec)
        return recover_codes(x, codes, params, self.spec) if frozen and not x.is_meta else codes

    @abstractmethod
    def store(self, x: torch.Tensor, params: QParams | None, frozen: bool = False) -> Tensors:
        """The tensors of x under these parameters; `frozen` says that x holds quantized values already.

        Works on the meta device too, to know shapes beforehand.
        """

    @abstractmethod
    def load(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """The float tensor of `shape` that the stored tensors stand for, in the model's dtype."""

    @abstractmethod
    def store_params(self, params: QParams) -> Tensors:
        """The tensors of static activation parameters."""

    def flaw(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> str | None:
        """Return the fault of the scales and zero points of stored tensors that stand for one of `shape`, as
        `quark.core.scales.flaw` says it; None where there is none. Shapes and dtypes are right already; codes are
        not read.
        """
        return None

    def rows_alone(self, shape: tuple[int, ...]) -> int | None:
        """A number of rows of which, or of a multiple of it, all that is stored follows from their values alone, but
        for the `constants`. None where a scale is that of all rows.

        The range of each scale is taken to be that of the values under it.
        """
        spec = self.spec
        if spec.scale_spec is not None or spec.code_spec is not None or isinstance(spec.split, PerTensor):
            return None
        return rows_together(spec, shape, self.word_rows)

    def constants(self, shape: tuple[int, ...]) -> Tensors:
        """Return the tensors that are stored of a weight of this shape, whatever its values are."""
        return {}

    def store_second(self, scale: torch.Tensor) -> Tensors:
        """The tensors of live activations whose scales have the static scale `scale`."""
        return {"scale_2": scale.float()}


class CodedLayout(Layout):
    """A layout of checkpoint folders, which gives back codes and scales too: exports and kernels read those."""

    @abstractmethod
    def load_codes(self, stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The values of the codes of a tensor of `shape`, as floats."""

    @abstractmethod
    def load_params(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> QParams:
        """Scale and zero point of a tensor of `shape`, from its stored tensors."""


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes (uint8) along the last axis of a matrix as one stream of bits, least significant first, in int32 words.

    The last word of a row is filled up with zeros: (n, m) gives (n, ceil(m bits / 32)).
    """
    rows = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % WORD))
    words = pack_bits(rows, bits).contiguous().view(torch.int32)
    return words[:, : math.ceil(codes.shape[-1] * bits / WORD)].contiguous()


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Inverse of `pack_words`: the first `count` codes of each row, as uint8."""
    whole = torch.nn.functional.pad(words, (0, -words.shape[-1] % bits))
    return unpack_bits(whole.contiguous().view(torch.uint8), bits)[:, :count]


def float_scale_dtype(kind: ScaleType, model_dtype: torch.dtype) -> torch.dtype:
    """Of a stored scale that is a plain float, and not the only one of its tensor."""
    named = {ScaleType.float: model_dtype, ScaleType.float16: torch.float16, ScaleType.bfloat16: torch.bfloat16}
    return named.get(kind, torch.float32)


def rows_together(spec: TensorSpec, shape: tuple[int, ...], words: int) -> int | None:
    """How many rows share words or a tile; None where a scale spans rows in another way."""
    levels = [spec.split, *(level.split for level in (spec.scale_spec, spec.code_spec) if level)]
    if len(shape) < 2 or not all(_by_rows(level, len(shape)) for level in levels):
        return None
    return math.lcm(words, *(level.size[0] for level in levels if isinstance(level, PerBlock)))


def _by_rows(split: Granularity, ndim: int) -> bool:
    """Return True where the scales of some rows of a matrix are known from these rows' place alone."""
    along_rows = isinstance(split, PerGroup) and split.axis % ndim == 0
    across = isinstance(split, PerChannel) and split.axis % ndim != 0
    return not along_rows and not across and not (isinstance(split, PerBlock) and ndim != 2)
