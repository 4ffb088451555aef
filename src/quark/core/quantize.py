"""quantize, dequantize, fake_quantize: the only place where the formulas are written.

    integers          q = clamp(round(x * (1/scale)) + zero_point, qmin, qmax)  y = (q - zero_point) * scale
    float zero point  q = clamp(round(x * (1/scale) + zero_point), qmin, qmax)
    floats            q = round_to(clamp(x / scale, -fmax, fmax))               y = q * scale
    block types       see block_types.py and block_search.py
    scales quantized  scale = q2 * scale2                                       (NVFP4)
    codes quantized   q2 = quantize(q), y = dequantize(q2) * scale              (int4 of FP8 codes)

Integers multiply by the float32 reciprocal of the scale, as the documented system (and torch's own integer
kernels) do; ONNX Runtime divides, which can differ by one code where x / scale lies within an ulp of a tie.

x, codes and y are float arrays (numpy or torch); a code is the float that it stands for. The arithmetic
is float32 (float64 for 32-bit integers, which float32 does not hold). `fake_quantize` walks over the first axis in
chunks that stay in the cache, so the handful of elementwise steps cost little more than reading the tensor once. On a
GPU a kernel takes all of them in one launch, see kernels/groups.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from quark.core.array import Array, astype, chunk_bytes_for, dtype_name, is_torch, minmax, namespace, on_cpu, row_chunks
from quark.core.blocks.block_search import search_levels
from quark.core.blocks.block_types import BlockType, block_codes, block_values
from quark.core.dtypes import DTYPES
from quark.core.granularity import PerTensor
from quark.core.kernels.groups import fake_quantize_at_once, takes
from quark.core.rounding import RoundType, round_integer, round_to
from quark.core.scales import QParams, qparams_from_range
from quark.core.spec import TensorSpec
from quark.errors import ConfigError, NonFiniteError, ShapeError


def range_of(x: Array, spec: TensorSpec) -> tuple[Array, Array]:
    """Minimum and maximum of each part of x that shares a scale, in the shape of the stored scale; float32."""
    split = spec.split
    blocks = split.blocks(x)
    low, high = minmax(blocks, split.axes(x.ndim))
    shape = split.scale_shape(tuple(x.shape))
    return astype(low.reshape(shape), "float32"), astype(high.reshape(shape), "float32")


def compute_qparams(x: Array, spec: TensorSpec) -> QParams:
    """Scale and zero point of x from its own minimum and maximum; of a block type, by search."""
    if isinstance(spec.dtype, BlockType):
        return block_qparams(x, None, spec)
    low, high = range_of(x, spec)
    params = qparams_from_range(low, high, spec, dtype_name(x))
    return second_level(params, x, spec)


def block_qparams(x: Array, importance: Array | None, spec: TensorSpec) -> QParams:
    """The scales of a block type that lose least on x, a matrix; see block_search.py.

    Of two levels, `scale` and `zero_point` are the integers c and k of the groups, and those of `second` d and e of the
    blocks; of one level they are d and m.

    Raises:
        ShapeError: x is no matrix, or its rows are no whole blocks.
        NonFiniteError: A scale is too large for float16.
    """
    if x.ndim != 2:
        raise ShapeError(f"{spec.dtype} cuts the rows of a matrix into blocks; this tensor has shape {tuple(x.shape)}.")
    assert isinstance(spec.dtype, BlockType)
    spec.granularity.scale_shape(tuple(x.shape))
    c, k, d, e = search_levels(x, importance, spec.dtype)
    halves = [half for half in ((c, k) if d is None else (d, e)) if half is not None]
    if any(bool((abs(half) >= DTYPES["float16"].max).any()) for half in halves):
        raise NonFiniteError("A scale is beyond the 65504 of float16, in which GGUF stores it.")
    return QParams(c, k, None if d is None else QParams(d, e))


def second_level(params: QParams, x: Array, spec: TensorSpec) -> QParams:
    """Add the second level of a two-level spec to first-level parameters of x."""
    if spec.scale_spec is not None:
        return quantize_scales(params, compute_qparams(params.scale, spec.scale_spec), spec)
    if spec.code_spec is not None:
        codes = quantize(x, params, replace(spec, code_spec=None))
        return replace(params, second=compute_qparams(codes, spec.code_spec))
    return params


def quantize_scales(params: QParams, second: QParams | None, spec: TensorSpec) -> QParams:
    """Round first-level scales to codes of the spec's `scale_spec` under the scale `second`, if there is one.

    A block that rounds to 0 gets 1.
    """
    if second is None:
        return params
    assert spec.scale_spec is not None
    codes = quantize(params.scale, second, spec.scale_spec)
    return QParams(namespace(codes).where(codes == 0, 1.0, codes), params.zero_point, second)


def effective(params: QParams, spec: TensorSpec) -> QParams:
    """One-level parameters: quantized scales multiplied out."""
    if isinstance(spec.dtype, BlockType) and params.second is not None:
        d, e = params.second.scale, params.second.zero_point
        grouped = (*d.shape, spec.dtype.groups)
        scale = (params.scale.reshape(grouped) * d[..., None]).reshape(params.scale.shape)
        if params.zero_point is None or e is None:
            return QParams(scale)
        return QParams(scale, (params.zero_point.reshape(grouped) * e[..., None]).reshape(scale.shape))
    if spec.scale_spec is None or params.second is None:
        return params
    return QParams(dequantize(params.scale, params.second, spec.scale_spec), params.zero_point)


def quantize(x: Array, params: QParams, spec: TensorSpec) -> Array:
    """Codes of x, as floats that hold the code's value; same shape as x."""
    if spec.is_cast:
        return round_to(astype(x, "float32"), spec.dtype, spec.rounding)
    split, shape = spec.split, tuple(x.shape)
    scale, zero = _broadcast(effective(params, spec), spec, shape)
    codes = split.unblock(_encode(split.blocks(x), scale, zero, spec), shape)
    if spec.code_spec is not None and params.second is not None:
        return quantize(codes, params.second, spec.code_spec)
    return codes


def recover_codes(x: Array, codes: Array, params: QParams, spec: TensorSpec) -> Array:
    """Codes that decode to x exactly, given x = dequantize(...) rounded to its own dtype.

    A frozen bfloat16 or float16 weight is rounded once more, which can move it to the next code: where `codes` do not
    decode to x, a neighbour does.
    """
    xp = namespace(x)
    for step in (1.0, -1.0):
        wrong = astype(dequantize(codes, params, spec), dtype_name(x)) != x
        if not bool(wrong.any()):
            return codes
        element = (spec.code_spec or spec).dtype
        nearby = xp.clip(codes + step, element.min, element.max)
        right = astype(dequantize(nearby, params, spec), dtype_name(x)) == x
        codes = xp.where(wrong & right, nearby, codes)
    return codes


def dequantize(codes: Array, params: QParams, spec: TensorSpec) -> Array:
    """The float32 values that the codes stand for."""
    if spec.is_cast:
        return astype(codes, "float32")
    if spec.code_spec is not None and params.second is not None:
        codes = dequantize(codes, params.second, spec.code_spec)
    split, shape = spec.split, tuple(codes.shape)
    scale, zero = _broadcast(effective(params, spec), spec, shape)
    return split.unblock(_decode(split.blocks(codes), scale, zero, spec), shape)


def fake_quantize(x: Array, params: QParams | None, spec: TensorSpec, out: Array | None = None) -> Array:
    """dequantize(quantize(x)): what x becomes, in the dtype of x.

    Args:
        x: Any float array.
        params: Scale and zero point; None computes them from x (dynamic quantization).
        spec: The element type and the rules.
        out: Where the result is written, x itself for in place; contiguous, same shape and dtype as x.
    """
    if out is None:
        out = namespace(x).empty_like(x)
    if not on_cpu(x) and _fake_quantize_at_once(x, params, spec, out):
        return out
    _fake_quantize_in_steps(x, params, spec, out)
    return out


def _fake_quantize_at_once(x: Array, params: QParams | None, spec: TensorSpec, out: Array) -> bool:
    """Return True where a kernel wrote the result to `out`; its scales are found before where it cannot find them."""

    def plain(x: Array, out: Array) -> None:
        _fake_quantize_in_steps(x, params, spec, out)

    if fake_quantize_at_once(x, params, spec, out, plain):
        return True
    if params is not None or not takes(x, spec):
        return False
    params = compute_qparams(x, spec)
    return fake_quantize_at_once(x, params, spec, out, plain)


def _fake_quantize_in_steps(x: Array, params: QParams | None, spec: TensorSpec, out: Array) -> None:
    """Write it to `out`, some rows at a time."""
    if params is None and not spec.is_cast:
        params = compute_qparams(x, spec)
    source, target = spec.split.blocks(x), spec.split.blocks(out)
    if spec.code_spec is not None or source.ndim == 0 or not (_is_view(source, x) and _is_view(target, out)):
        out[...] = fake_quantize_traceable(x, params, spec)
        return
    scale = zero = None
    if params is not None:
        scale, zero = _broadcast(effective(params, spec), spec, tuple(x.shape))
    if isinstance(spec.split, PerTensor):
        source, target = source.reshape(-1), target.reshape(-1)
        scale, zero = _each(lambda part: part.reshape(1), scale, zero)
    while source.ndim > 1 and source.shape[0] == 1:
        source, target = source[0], target[0]
        scale, zero = _each(lambda part: part[0], scale, zero)
    for rows in row_chunks(source.shape[0], 4 * math.prod(source.shape[1:]), chunk_bytes_for(x)):
        target[rows] = _saturate(
            _qdq(source[rows], _rows_of_parameter(scale, rows), _rows_of_parameter(zero, rows), spec), x
        )


def _each(change: Callable[[Array], Array], *parts: Array | None) -> tuple[Array | None, ...]:
    return tuple(None if part is None else change(part) for part in parts)


class FakeQuantizer:
    """fake_quantize under scales that stay: what follows from them is computed once, and no step allocates. Same bits.

    For loops over small float32 tensors with a scale for all or for a channel, where calls cost more than arithmetic;
    others take the way of `fake_quantize`.

    Args:
        params, spec: As `fake_quantize` takes them.
        shape: Of the tensors to come.
    """

    def __init__(self, params: QParams | None, spec: TensorSpec, shape: tuple[int, ...]) -> None:
        self.params, self.spec, self.bytes = params, spec, 4 * math.prod(shape)
        self.is_plain = spec.has_zero_point and spec.code_spec is None and _work_dtype(spec) == "float32"
        self.is_plain &= spec.rounding is RoundType.half_even and tuple(spec.split.block_shape(shape)) == shape
        if not self.is_plain or params is None:
            return
        self.scale, zero = _broadcast(effective(params, spec), spec, shape)
        self.reciprocal = 1.0 / self.scale
        self.zero = None if spec.symmetric and spec.dtype.signed else zero

    def __call__(self, x: Array, out: Array) -> None:
        """Write what x becomes to `out`, which may be x."""
        spec = self.spec
        if not self.is_plain or self.params is None or self.bytes > chunk_bytes_for(x):
            fake_quantize(x, self.params, spec, out=out)
            return
        xp = namespace(x)
        xp.multiply(x, self.reciprocal, out=out)
        if self.zero is not None and spec.float_zero_point:
            out += self.zero
        xp.round(out, out=out)
        if self.zero is not None and not spec.float_zero_point:
            out += self.zero
        xp.clip(out, spec.dtype.min, spec.dtype.max, out=out)
        if self.zero is not None:
            out -= self.zero
        out *= self.scale


def blockwise(params: QParams, spec: TensorSpec, shape: tuple[int, ...]) -> tuple[Array, Array | None]:
    """Scale and zero point as they broadcast against the block view of a tensor of `shape`, quantized scales multiplied
    out; float32.

    For solvers that quantize a tensor piece by piece with `quantize_elements`. Raises ConfigError where codes are
    quantized once more, because then no element has a grid of its own.
    """
    if spec.code_spec is not None:
        raise ConfigError(f"{spec}: codes that are quantized once more cannot be solved element by element.")
    return _broadcast(effective(params, spec), spec, shape)


def elementwise(params: QParams, spec: TensorSpec, shape: tuple[int, ...]) -> tuple[Array, Array | None]:
    """Scale and zero point of every element of a tensor of `shape`, quantized scales multiplied out; float32."""
    scale, zero = blockwise(params, spec, shape)

    def spread(part: Array) -> Array:
        return spec.split.unblock(namespace(part).broadcast_to(part, spec.split.block_shape(shape)), shape)

    return spread(scale), None if zero is None else spread(zero)


def quantize_elements(x: Array, scale: Array, zero: Array | None, spec: TensorSpec) -> Array:
    """fake_quantize of x under scales and zero points that broadcast against it; float32."""
    return _qdq(x, scale, zero, spec)


def fake_quantize_traceable(x: Array, params: QParams | None, spec: TensorSpec) -> Array:
    """X quantized and dequantized without views, chunks or `out`: slower, and torch.export can trace it."""
    if params is None and not spec.is_cast:
        params = compute_qparams(x, spec)
    y = dequantize(quantize(x, params, spec), params, spec)  # type: ignore[arg-type]
    return astype(_saturate(y, x), dtype_name(x))


def _saturate(y: Array, x: Array) -> Array:
    """Y within the range of x's dtype: a code times its scale may pass the 65504 of float16."""
    return namespace(y).clip(y, -65504.0, 65504.0) if dtype_name(x) == "float16" else y


def _is_view(part: Array, whole: Array) -> bool:
    """Return True where `part` shares the memory of `whole`, entire and in order."""
    if is_torch(whole):
        return bool(part.data_ptr() == whole.data_ptr() and whole.is_contiguous() and part.numel() == whole.numel())
    return bool(np.shares_memory(part, whole) and whole.flags.c_contiguous and part.size == whole.size)


def _rows_of_parameter(parameter: Array | None, rows: slice) -> Array | None:
    return parameter if parameter is None or parameter.shape[0] == 1 else parameter[rows]


def _broadcast(params: QParams, spec: TensorSpec, shape: tuple[int, ...]) -> tuple[Array, Array | None]:
    """Scale and zero point, shaped to broadcast against the block view."""
    work = _work_dtype(spec)
    scale = spec.split.to_blocks(astype(params.scale, work), shape)
    if params.zero_point is None:
        return scale, None
    return scale, spec.split.to_blocks(astype(params.zero_point, work), shape)


def _work_dtype(spec: TensorSpec) -> str:
    return "float64" if spec.dtype.bits > 16 and not spec.dtype.is_float else "float32"


def _qdq(x: Array, scale: Array | None, zero: Array | None, spec: TensorSpec) -> Array:
    if scale is None:
        return round_to(astype(x, "float32"), spec.dtype, spec.rounding)
    return _decode(_encode(x, scale, zero, spec), scale, zero, spec)


def _encode(x: Array, scale: Array, zero: Array | None, spec: TensorSpec) -> Array:
    xp, dtype = namespace(x), spec.dtype
    x = astype(x, _work_dtype(spec))
    if isinstance(dtype, BlockType):
        return block_codes(x, scale, zero, dtype)
    if dtype.is_float:
        # A group of zeros may have scale 0 (E5M3): its codes are 0.
        return round_to(x / xp.where(scale == 0, 1.0, scale), dtype, spec.rounding)
    # Steps of the block formats are powers of two, whose reciprocal may overflow: dividing is exact there.
    codes = x / scale if dtype.is_block else x * (1.0 / scale)
    if spec.float_zero_point:
        codes += zero
    codes = round_integer(codes, spec.rounding)
    if zero is not None and not spec.float_zero_point and not (spec.symmetric and dtype.signed):
        codes += zero
    return xp.clip(codes, dtype.min, dtype.max)


def _decode(codes: Array, scale: Array, zero: Array | None, spec: TensorSpec) -> Array:
    codes = astype(codes, _work_dtype(spec))
    if isinstance(spec.dtype, BlockType):
        y: Array = block_values(codes, scale, zero)
        return y
    if zero is not None and not (spec.symmetric and spec.dtype.signed):
        codes = codes - zero
    return astype(codes * scale, "float32")
