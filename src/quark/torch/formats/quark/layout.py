"""The `quark` layout: what transformers, vLLM and SGLang read.

    int4, uint4       int32 words of 8 nibbles along the last axis; per group the matrix is transposed first, so
                      weight (I, O/8), scale (I/g, O), zero_point (I/g, O/8); per channel weight (O, I/8)
    int2 / uint2      one int32 for each value / 4 values a byte, first on top; per group transposed
    int3              8 values in 3 bytes, least significant first
    fp4, fp6          2 values in a byte, 4 values in 3 bytes, least significant first
    int8, fp8, 16 bit the native torch dtype
    E8M0 scale        uint8 exponent + 127;  E5M3 scale: uint8 code;  NVFP4 scales: float8_e4m3 under a float32 scale_2
    mx4, mx6, mx9     codes of 3, 5, 8 bits; scale: uint8 exponent of each block; shift: one bit for each pair
    bfp16             int8 codes; scale: uint8 exponent of the step

Rows that are no whole number of words end in zeros. The last two rows and int16 are ours: the documented system cannot
export them. "fake" storage keeps the float weight with quantized values, and scales in the float dtype, not transposed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from quark.core.array import astype
from quark.core.dtypes import DTYPES, MICRO_EXPONENT, Dtype
from quark.core.granularity import PerBlock, PerGroup, PerTensor
from quark.core.kernels.runs import packed_codes
from quark.core.names.registry import Registry
from quark.core.packing import (
    AWQ_ORDER,
    MSB_PAIRS,
    SEQUENTIAL,
    decode,
    encode,
    pack_bits,
    pack_int4,
    unpack_bits,
    unpack_int4,
)
from quark.core.quantize import dequantize, effective, fake_quantize
from quark.core.scales import QParams, exp2, exponent, flaw
from quark.core.spec import ScaleType, TensorSpec
from quark.errors import ShapeError
from quark.torch.formats.layout import CodedLayout, Tensors, float_scale_dtype, rows_together

PACK_METHODS: Registry[Sequence[int]] = Registry("pack_method")
PACK_METHODS.register("reorder", AWQ_ORDER)
PACK_METHODS.register("order", SEQUENTIAL)

TRANSPOSED = frozenset({"int4", "uint4", "int2", "uint2"})
_FIRST_ON_TOP = frozenset({"uint2"})
_NATIVE_BITS = frozenset({8, 16, 32})
"""Widths that have a torch dtype; any other is packed into bytes."""
_NO_EXPONENT = 255
"""The code of an E8M0 scale that is NaN."""
PIECE = 1 << 20
"""Bytes of float32 that are turned into codes at once."""
_NIBBLES = 8
"""4-bit codes in a word; narrower and wider ones lie in bytes or words of their own."""


class QuarkLayout(CodedLayout):
    """The `quark` layout of one tensor."""

    word_rows = _NIBBLES

    def __init__(
        self, spec: TensorSpec, model_dtype: torch.dtype, pack_method: str = "reorder", real: bool = True
    ) -> None:
        super().__init__(spec, model_dtype, pack_method, real)
        self.order = PACK_METHODS[pack_method]

    @property
    def element(self) -> Dtype:
        """Type of the stored codes."""
        return (self.spec.code_spec or self.spec).dtype

    def store(self, x: torch.Tensor, params: QParams | None, frozen: bool = False) -> Tensors:
        if self.spec.is_cast:
            return {"": fake_quantize(x, None, self.spec).to(getattr(torch, self.element.torch))}
        assert params is not None
        if not self.real:
            return {"": fake_quantize(x, params, self.spec), **self._fake_params(params)}
        return {"": self._store_rows(x, params, frozen), **self.store_params(params, x.ndim)}

    def load(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        if self.spec.is_cast or not self.real:
            return tensors[""].to(self.model_dtype)
        codes = self.load_codes(tensors[""], shape)
        return dequantize(codes, self.load_params(tensors, shape), self.spec).to(self.model_dtype)

    # Codes ---------------------------------------------------------------------------------------------------------

    def _transposed(self, ndim: int) -> bool:
        return ndim == 2 and self.element.name in TRANSPOSED and isinstance(self.spec.granularity, PerGroup)

    def _store_rows(self, x: torch.Tensor, params: QParams, frozen: bool) -> torch.Tensor:
        """Packed codes of x, made from rows that stay in the cache: no step of it holds all of x in float32."""
        # The 16 codes of 4 bits lie so far apart that a frozen value, rounded to bfloat16, is still nearest to its own.
        nearest = not frozen or self.element.bits == 4
        compiled = self._store_compiled(x, params) if nearest and not self.spec.code_spec else None
        if compiled is not None:
            return compiled
        # Whole words and whole tiles; all rows where a scale spans rows.
        unit, step = rows_together(self.spec, tuple(x.shape), _NIBBLES), x.shape[0] if x.ndim else 1
        if unit is not None:
            step = max(unit, PIECE // (4 * max(1, math.prod(x.shape[1:]))) // unit * unit)
        if x.is_meta or step >= x.shape[0]:
            return self._store_piece(x, params, frozen)
        axis = 1 if self._transposed(x.ndim) else 0
        out: torch.Tensor | None = None
        for start in range(0, x.shape[0], step):
            rows = slice(start, min(start + step, x.shape[0]))
            piece = self._store_piece(x[rows], params_of_rows(params, self.spec, rows, tuple(x.shape)), frozen)
            if out is None:
                per_row = piece.shape[axis] / step
                size = list(piece.shape)
                size[axis] = math.ceil(x.shape[0] * per_row)
                out = piece.new_empty(size)
            begin = round(start * per_row)
            out.narrow(axis, begin, piece.shape[axis]).copy_(piece)
        assert out is not None
        return out

    def _store_compiled(self, x: torch.Tensor, params: QParams) -> torch.Tensor | None:
        """Packed codes made in one pass over x; None where that is not compiled."""
        dtype, transposed = self.element, self._transposed(x.ndim)
        if x.is_meta or (transposed and dtype.bits != 4):
            return None
        params = effective(params, self.spec)
        stored = packed_codes(x.detach(), params.scale, params.zero_point, self.spec, self._order, transposed)
        if stored is None or dtype.bits == 8:
            return None if stored is None else _as_native(stored.reshape(x.shape), dtype)
        return stored if dtype.is_float else stored.view(torch.int32)

    @property
    def _order(self) -> Sequence[int]:
        """Of the codes in a word: integers of 4 bits have one of two."""
        return SEQUENTIAL if self.element.is_float else self.order

    def _store_piece(self, x: torch.Tensor, params: QParams, frozen: bool) -> torch.Tensor:
        return self._store_codes(self.codes(x, params, frozen))

    def _store_codes(self, values: torch.Tensor) -> torch.Tensor:
        dtype = self.element
        codes = encode(values, dtype)
        if self._transposed(values.ndim):
            codes = codes.t().contiguous()
        if dtype.name == "int2":
            return decode(codes, dtype).to(torch.int32)
        if dtype.name in ("int4", "uint4"):
            return pack_int4(_whole_words(codes), self.order)
        if dtype.bits not in _NATIVE_BITS:
            return pack_bits(_whole_words(codes), dtype.bits, _bit_order(dtype))
        return _as_native(codes, dtype)

    def load_codes(self, stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The values of the codes of a tensor of `shape`."""
        dtype, transposed = self.element, self._transposed(len(shape))
        matrix = (shape[1], shape[0]) if transposed else (shape[0], math.prod(shape[1:]))
        if dtype.name == "int2":
            values = stored.to(torch.float32)
        elif dtype.name in ("int4", "uint4"):
            values = decode(unpack_int4(stored, self.order), dtype)
        elif dtype.bits not in _NATIVE_BITS:
            values = decode(unpack_bits(stored, dtype.bits, _bit_order(dtype)), dtype)
        elif dtype.is_float and stored.dtype == torch.uint8:
            values = decode(stored, dtype)
        else:
            values = stored.to(torch.float64 if dtype.bits > 16 else torch.float32)
        # Contiguous: a matrix product over another layout sums in another order.
        values = values.reshape(matrix[0], -1)[:, : matrix[1]]
        return (values.t() if transposed else values).reshape(shape).contiguous()

    # Scales --------------------------------------------------------------------------------------------------------

    def store_params(self, params: QParams, ndim: int = 0) -> Tensors:
        transpose = self._transposed(ndim)
        out = self._store_scale(params.scale)
        if params.zero_point is not None and self.spec.has_zero_point:
            out["zero_point"] = self._store_zero_point(params.zero_point, self.spec, transpose)
        if transpose:
            out["scale"] = out["scale"].t().contiguous()
        second = self.spec.scale_spec or self.spec.code_spec
        if params.second is not None and second is not None:
            out["scale_2"] = params.second.scale.to(torch.float32)
            if params.second.zero_point is not None and second.has_zero_point:
                out["zero_point_2"] = self._store_zero_point(params.second.zero_point, second, False)
        return out

    def load_params(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> QParams:
        """Inverse of `store_params` for a tensor of `shape`."""
        spec, transpose = self.spec, self._transposed(len(shape))
        scale = tensors["scale"].t().contiguous() if transpose else tensors["scale"]
        second_spec = spec.scale_spec or spec.code_spec
        zero = second = None
        if "zero_point" in tensors:
            count = scale.shape[0 if transpose else -1] if scale.ndim else 1
            zero = self._load_zero_point(tensors["zero_point"], spec, transpose, count)
        if "scale_2" in tensors and second_spec is not None:
            second_zero = tensors.get("zero_point_2")
            scale_2 = tensors["scale_2"].float()
            if second_zero is not None:
                second_zero = self._load_zero_point(second_zero, second_spec, False, scale_2.numel())
            second = QParams(scale_2, second_zero)
        return QParams(self._load_scale(scale, tensors.get("shift"), shape), zero, second)

    def flaw(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> str | None:
        if self.spec.is_cast or not self.real:
            return None  # the values are there themselves: nothing is computed from a scale
        if self.element.name == "int2" and not bool((tensors[""].abs() <= 2).all() and (tensors[""] < 2).all()):
            return "codes are no 2-bit integers"  # each has 32 bits to itself
        scale = tensors["scale"]
        if self._is_exponent and bool((scale == _NO_EXPONENT).any()):
            return "scale holds the exponent of NaN"
        return flaw(self.load_params(tensors, shape), self.spec)

    @property
    def _is_exponent(self) -> bool:
        return self.spec.dtype.is_block or self.spec.scale_type is ScaleType.float8_e8m0fnu

    def _store_scale(self, scale: torch.Tensor) -> Tensors:
        spec = self.spec
        if spec.dtype.name in MICRO_EXPONENT:
            return self._store_micro(scale)
        if self._is_exponent:
            return {"scale": (_exponent(scale) + 127 + _code_exponent(spec)).to(torch.uint8)}
        if spec.scale_spec is not None:
            return {"scale": _as_native(encode(scale, spec.scale_spec.dtype), spec.scale_spec.dtype)}
        if spec.scale_type is ScaleType.float8_e5m3:
            return {"scale": encode(scale, _E5M3)}
        return {"scale": scale.to(self.scale_dtype())}

    def _load_scale(self, stored: torch.Tensor, shift: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
        spec = self.spec
        if shift is not None:
            return self._load_micro(stored, shift, shape)
        if self._is_exponent:
            return exp2(stored.to(torch.int32) - 127 - _code_exponent(spec))
        if spec.scale_type is ScaleType.float8_e5m3:
            return decode(stored, _E5M3)
        if spec.scale_spec is not None and stored.dtype == torch.uint8:
            return decode(stored, spec.scale_spec.dtype)
        return stored.to(torch.float32)

    def scale_dtype(self) -> torch.dtype:
        """Of a stored scale that is a plain float."""
        kind = self.spec.scale_type
        if kind is ScaleType.float and isinstance(self.spec.granularity, PerTensor) and not self.spec.dtype.is_float:
            return torch.float32
        return float_scale_dtype(kind, self.model_dtype)

    def _store_micro(self, step: torch.Tensor) -> Tensors:
        e = _exponent(step) + (self.spec.dtype.bits - 2)
        pairs = self._pairs()
        grouped = pairs.blocks(e + 127)
        block = grouped.amax(dim=pairs.axes(step.ndim), keepdim=True)
        shift = pairs.unblock(block - grouped, tuple(e.shape))
        axis = pairs.axes(step.ndim)[0]
        flags = torch.nn.functional.pad(shift.to(torch.uint8), (0, -shift.shape[-1] % 8))  # to whole bytes
        return {"scale": block.squeeze(axis).to(torch.uint8), "shift": pack_bits(flags, 1)}

    def _load_micro(self, scale: torch.Tensor, shift: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        pairs = self._pairs()
        pair_shape = self.spec.split.scale_shape(shape)
        flags = unpack_bits(shift, 1)[..., : pair_shape[-1]].to(torch.int32)
        grouped = pairs.blocks(flags)
        block = scale.to(torch.int32).unsqueeze(pairs.axes(len(shape))[0])
        return exp2(pairs.unblock(block - grouped, pair_shape) - 127 - (self.spec.dtype.bits - 2))

    def _pairs(self) -> PerGroup:
        """The pairs of one block, along the axis of the scale."""
        pairs = self.spec.pairs
        if pairs.axis != -1:
            raise ShapeError(f"{self.spec.dtype} is stored along the last axis; this tensor uses {pairs.axis}.")
        return pairs

    def _store_zero_point(self, zero: torch.Tensor, spec: TensorSpec, transpose: bool) -> torch.Tensor:
        if spec.float_zero_point:
            return zero.t().contiguous() if transpose else zero
        if spec.dtype.bits != 4 or zero.ndim == 0:
            native = torch.int8 if spec.dtype.signed else torch.uint8
            stored = zero.to(native if spec.dtype.bits <= 8 else getattr(torch, spec.dtype.torch))
            return stored.t().contiguous() if transpose else stored
        codes = encode(zero, spec.dtype)
        return pack_int4(_whole_words(codes.t() if transpose else codes), self.order)

    def _load_zero_point(self, stored: torch.Tensor, spec: TensorSpec, transpose: bool, count: int) -> torch.Tensor:
        if spec.dtype.bits == 4 and stored.ndim > 0 and not spec.float_zero_point and stored.dtype == torch.int32:
            stored = decode(unpack_int4(stored, self.order), spec.dtype)[..., :count]
        zero = stored.to(torch.float32)
        return zero.t().contiguous() if transpose else zero

    def _fake_params(self, params: QParams) -> Tensors:
        out = {"scale": params.scale.to(self.scale_dtype() if not self.spec.dtype.is_block else self.model_dtype)}
        if params.zero_point is not None and self.spec.has_zero_point:
            zero = params.zero_point
            out["zero_point"] = zero if self.spec.float_zero_point else zero.to(torch.int32)
        if params.second is not None:
            out["scale_2"] = params.second.scale.to(torch.float32)
        return out


_E5M3 = DTYPES["fp8_e5m3"]


def params_of_rows(params: QParams, spec: TensorSpec, rows: slice, shape: tuple[int, ...]) -> QParams:
    """The parameters of some rows of a tensor of `shape`, given those of all of it."""
    split = spec.split
    if not isinstance(split, PerTensor):
        tile = split.size[0] if isinstance(split, PerBlock) else 1
        cut = slice(rows.start // tile, -(-rows.stop // tile))
        zero = params.zero_point
        params = QParams(params.scale[cut], zero if zero is None else zero[cut], params.second)
    if params.second is None:
        return params
    second = spec.scale_spec or spec.code_spec
    assert second is not None
    # Scales have a row for each row of x, unless there is one scale for all of it.
    whole = spec.scale_spec is not None and params.scale.ndim == 0
    return params if whole else replace(params, second=params_of_rows(params.second, second, rows, shape))


def _bit_order(dtype: Dtype) -> Sequence[int]:
    return MSB_PAIRS if dtype.name in _FIRST_ON_TOP else SEQUENTIAL


def _whole_words(codes: torch.Tensor) -> torch.Tensor:
    """Codes as a matrix (a vector stays one) whose rows are padded with zeros to whole words of 8."""
    rows = codes.reshape(codes.shape[0], -1) if codes.ndim > 1 else codes
    return torch.nn.functional.pad(rows, (0, -rows.shape[-1] % 8))


def _as_native(codes: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    """Codes of 8 bits reinterpreted, wider ones converted, as the torch dtype of the type."""
    native = getattr(torch, dtype.torch)
    if dtype.bits <= 8:
        return codes.view(native)
    # A 16-bit code is a bit pattern: its sign is in bit 15.
    return astype(decode(codes, dtype), dtype.torch) if dtype.bits == 16 else codes.to(native)


def _exponent(scale: torch.Tensor) -> torch.Tensor:
    """log2 of powers of two, subnormals included; int32."""
    tiny = scale < 2.0**-126
    e: torch.Tensor = exponent(torch.where(tiny, scale * 2.0**64, scale))
    return torch.where(tiny, e - 64, e)


def _code_exponent(spec: TensorSpec) -> int:
    """log2 of the value 1.0 in codes: the shared scale of MXINT8 is 64 codes, of the others 1."""
    return spec.dtype.emax if spec.dtype.name == "mxint8" else 0
