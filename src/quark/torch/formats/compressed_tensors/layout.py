"""The tensors of the `compressed-tensors` format.

    integers, packed   weight_packed int32 (O, ceil(b I / 32)): a row is one stream of b-bit codes, first code in the
                       lowest bits, the smallest code 0; weight_zero_point int32 (ceil(b O / 32), G), packed down
                       the columns; weight_shape int64 (2,)
    integers, native   weight int8 (O, I), weight_zero_point int8
    float8             weight float8_e4m3 (O, I)
    fp4, fp6           weight_packed uint8, 2 codes in a byte, 4 codes in 3 bytes
    scales             weight_scale (1,), (O, 1), (O, G) or tiles; E8M0: uint8 exponent + 127
    KV cache           k_scale, v_scale (1,), or (heads, 1, 1)
    NVFP4              weight_scale float8_e4m3 (O, G), weight_global_scale float32 (1,), which divides
                       it: scale = weight_scale / weight_global_scale; input_global_scale likewise

Codes of an unsigned type are stored as the signed ones that are half the range lower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from quark.core.dtypes import DTYPES
from quark.core.granularity import HEADS, PerTensor
from quark.core.packing import decode, encode, pack_bits, unpack_bits
from quark.core.quantize import dequantize
from quark.core.scales import QParams, exp2, exponent, flaw
from quark.core.spec import ScaleType, TensorSpec
from quark.torch.formats.layout import CodedLayout, Tensors, pack_words, unpack_words

E8M0 = ScaleType.float8_e8m0fnu
E4M3 = torch.float8_e4m3fn


class CompressedTensorsLayout(CodedLayout):
    """The layout of one tensor.

    Args:
        spec, model_dtype: See Layout.
        packed: Whether integer codes lie in words; None: as a layer without quantized inputs has them.
    """

    def __init__(
        self,
        spec: TensorSpec,
        model_dtype: torch.dtype,
        pack_method: str = "reorder",
        real: bool = True,
        packed: bool | None = None,
    ) -> None:
        super().__init__(spec, model_dtype, pack_method, real)
        self.packed = not spec.dtype.is_float if packed is None else packed

    def store(self, x: torch.Tensor, params: QParams | None, frozen: bool = False) -> Tensors:
        assert params is not None
        out = {"": self._store_codes(self.codes(x, params, frozen)), **self.store_params(params)}
        if not self.packed or self.spec.dtype.is_float:
            return out
        if "zero_point" in out:
            assert params.zero_point is not None
            zeros = params.zero_point.reshape(x.shape[0], -1)
            out["zero_point"] = self._pack_words(zeros.t()).t().contiguous()
        return {**out, **{suffix: size.to(x.device) for suffix, size in self.constants(tuple(x.shape)).items()}}

    def constants(self, shape: tuple[int, ...]) -> Tensors:
        in_words = self.packed and not self.spec.dtype.is_float
        return {"shape": torch.tensor(shape, dtype=torch.int64)} if in_words else {}

    def load(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        codes = self.load_codes(tensors[""], shape)
        values = dequantize(codes, self.load_params(tensors, shape), self.spec)
        return values.reshape(shape).to(self.model_dtype)

    # Codes ---------------------------------------------------------------------------------------------------------

    def _store_codes(self, codes: torch.Tensor) -> torch.Tensor:
        dtype = self.spec.dtype
        if not dtype.is_float:
            return self._pack_words(codes) if self.packed else (codes - self._middle()).to(torch.int8)
        bits = encode(codes, dtype)
        return bits.view(E4M3) if dtype.bits == 8 else pack_bits(bits, dtype.bits)

    def load_codes(self, stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The values of the codes of a tensor of `shape`."""
        dtype = self.spec.dtype
        if not dtype.is_float:
            return self._unpack_words(stored, shape[-1]) if self.packed else stored.float() + self._middle()
        if dtype.bits == 8:
            return stored.float()
        return decode(unpack_bits(stored, dtype.bits), dtype)[..., : shape[-1]].contiguous()

    def _middle(self) -> float:
        """The number that is subtracted from a code to make it signed."""
        dtype = self.spec.dtype
        return 0.0 if dtype.signed else float(1 << (dtype.bits - 1))

    def _pack_words(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes along the last axis as one stream of bits, cut into int32 words."""
        return pack_words((codes - self.spec.dtype.min).to(torch.uint8), self.spec.dtype.bits)

    def _unpack_words(self, words: torch.Tensor, columns: int) -> torch.Tensor:
        return unpack_words(words, self.spec.dtype.bits, columns).float() + self.spec.dtype.min

    # Scales --------------------------------------------------------------------------------------------------------

    def store_params(self, params: QParams) -> Tensors:
        spec, scale = self.spec, params.scale
        out = {}
        if spec.scale_type is E8M0:
            out["scale"] = (exponent(scale) + 127).to(torch.uint8)
        elif spec.scale_spec is not None:
            assert params.second is not None
            out["scale"] = scale.to(E4M3)
            out.update(self.store_second(params.second.scale))
        else:
            heads = (-1, 1, 1) if spec.granularity == HEADS else None
            several = spec.dtype.is_float or not isinstance(spec.granularity, PerTensor)
            dtype = self.model_dtype if spec.scale_type is ScaleType.float and several else torch.float32
            out["scale"] = scale.to(dtype).reshape(heads or _with_columns(scale))
        if params.zero_point is not None and spec.has_zero_point and not spec.symmetric:
            zero = (params.zero_point - self._middle()).to(torch.int8)
            out["zero_point"] = zero.reshape(_with_columns(zero))
        return out

    def store_second(self, scale: torch.Tensor) -> Tensors:
        """The scale of the scales is stored as its reciprocal."""
        return {"scale_2": (1.0 / scale.float()).reshape(1)}

    def load_params(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> QParams:
        """Inverse of `store_params` for a weight of `shape`."""
        spec, scale = self.spec, tensors["scale"]
        split = spec.split.scale_shape(shape)  # without the column that one scale a row is stored with
        scale = scale.reshape(split)
        zero = tensors.get("zero_point")
        if zero is not None:
            zero = self._unpack_words(zero.t(), shape[0]).t() if self.packed else zero.float() + self._middle()
            zero = zero.reshape(split)
        elif spec.has_zero_point:
            zero = torch.full_like(scale, 0.0 if spec.dtype.signed else self._middle(), dtype=torch.float32)
        if spec.scale_type is E8M0:
            return QParams(exp2(scale.to(torch.int32) - 127))
        second = QParams(1.0 / tensors["scale_2"].reshape(())) if "scale_2" in tensors else None
        return QParams(scale.float(), zero, second)

    def flaw(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> str | None:
        return flaw(self.load_params(tensors, shape), self.spec)


def _with_columns(scale: torch.Tensor) -> tuple[int, ...]:
    """Shape of a stored scale: (1,) for one, (O, 1) for one a row."""
    if scale.ndim == 0:
        return (1,)
    return (scale.shape[0], 1) if scale.ndim == 1 else tuple(scale.shape)


def signed(spec: TensorSpec) -> TensorSpec:
    """The spec under which the stored codes are read: unsigned types become signed ones of the same width."""
    if spec.dtype.is_float or spec.dtype.signed:
        return spec
    return replace(spec, dtype=DTYPES[spec.dtype.name.removeprefix("u")])
