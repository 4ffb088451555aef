"""Runs: values that lie beside each other and share a scale. Their ranges and codes, in one compiled pass over memory.

    run_ranges        smallest and largest value of each run
    packed_codes      codes as `quark.core.quantize` makes them, as `quark.core.packing` packs them
    live_codes        codes of rows, each under the scale of its own range

The same bits as those two, which do the work where this returns None: where no compiler is, for arrays of numpy or on a
device, and for what is rare. runs.cpp has the code. Nothing here can be traced or differentiated: it is for weights.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from quark.base import native
from quark.core.array import Array, dtype_name, is_torch, namespace
from quark.core.blocks.block_types import BlockType
from quark.core.granularity import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quark.core.packing import SEQUENTIAL
from quark.core.rounding import RoundType
from quark.core.spec import ScaleType, TensorSpec
from quark.errors import ShapeError

_COMPILED = ("bfloat16", "float32")
"""dtypes with compiled passes."""
WORTH_COMPILING = 1 << 20
"""Values of a tensor that comes from a real model, which is worth a second of compiling, once on a machine."""
WORTH_A_THREAD = 1 << 18
TILE = 256
"""Rows that are packed together where words lie along the rows."""


class CodeRule(ctypes.Structure):
    """The rule by which values become codes; see runs.cpp."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("low", "high", "shift", "least", "rounder", "small")),
        *((name, ctypes.c_int32) for name in ("is_float", "bits", "drop", "offset", "sign")),
        ("place", ctypes.c_int32 * 8),
    )


def run_ranges(x: Array, spec: TensorSpec) -> tuple[Array, Array] | None:
    """Smallest and largest value for each scale, shaped as scales are; None where no compiled pass serves x."""
    length = _run_length(x, spec) if _is_compiled(x) else 0
    if not length:
        return None
    low, high = ranges(x, length)
    shape = spec.split.scale_shape(tuple(x.shape))
    if isinstance(spec.split, PerTensor):
        low, high = low.amin(), high.amax()
    return low.reshape(shape), high.reshape(shape)


def ranges(x: Array, length: int) -> tuple[Array, Array]:
    """Smallest and largest value of each run of `length` values of a contiguous tensor; float32, NaN where one is."""
    runs = math.prod(x.shape) // length
    low, high = namespace(x).empty((2, runs), dtype=namespace(x).float32)
    function = _function("ranges", x)

    def part(start: int, count: int) -> None:
        at = 4 * start
        function(x.data_ptr() + start * length * x.itemsize, count, length, low.data_ptr() + at, high.data_ptr() + at)

    native.in_threads(runs, max(1, WORTH_A_THREAD // length), part)
    return low, high


def packed_codes(
    x: Array, scale: Array, zero: Array | None, spec: TensorSpec, order: Sequence[int], transposed: bool
) -> Array | None:
    """Codes of a tensor as stored bytes.

    Args:
        x: (rows, ...).
        scale, zero: Of each part of x that shares them, float32; one level (`quark.core.quantize.effective`).
        spec: A type of 4 or 8 bits.
        order: Of 4 bits: order[i] is the code of each 8 that goes to bits 4 i and up.
        transposed: Words of 4-bit codes lie along the rows of a matrix.

    Returns:
        uint8: (rows, values of a row * bits / 8), transposed (values of a row, rows / 2). None: not compiled for this.
    """
    rows, columns = x.shape[0] if x.ndim else 1, math.prod(x.shape[1:])
    words = 1 if spec.dtype.bits == 8 else 8
    length = _run_length(x, spec) if _is_compiled(x) and _is_plain(spec) else 0
    counts = (rows,) if transposed else (length, columns)
    if not length or any(count % words for count in counts):
        return None
    scale = (namespace(x).where(scale == 0, 1.0, scale) if spec.dtype.is_float else 1.0 / scale).contiguous()
    if spec.dtype.is_float or (spec.symmetric and spec.dtype.signed):
        zero = None
    zero = None if zero is None else zero.contiguous()
    rule = rule_of(spec, order)
    if transposed:
        return _transposed_codes(x, length, scale, zero, rule)
    return codes(x, length, scale.reshape(-1), zero, rule).reshape(rows, -1)


def _transposed_codes(x: Array, length: int, scale: Array, zero: Array | None, rule: CodeRule) -> Array:
    """Codes of 4 bits along the rows of a matrix, whose values share a scale for `length` columns."""
    rows, columns = x.shape[0], math.prod(x.shape[1:])
    out = namespace(x).empty((columns, rows // 2), dtype=namespace(x).uint8)
    function, runs = _function("transposed", x), columns // length

    def part(start: int, count: int) -> None:
        first, count = start * TILE, min(count * TILE, rows - start * TILE)
        values = [None if each is None else each.data_ptr() + 4 * first * runs for each in (scale, zero)]
        source = x.data_ptr() + first * columns * x.itemsize
        function(source, count, columns, length, *values, rule, rows // 8, out.data_ptr() + first // 2)

    native.in_threads(-(-rows // TILE), max(1, WORTH_A_THREAD // (TILE * columns)), part)
    return out


def codes(x: Array, length: int, scale: Array, zero: Array | None, rule: CodeRule) -> Array:
    """Codes of the runs of a contiguous tensor, in a row of bytes.

    Args:
        x: bfloat16 or float32, on the CPU.
        length: Values of a run.
        scale, zero: Of each run, or one of all; float32. The scale of integers is its inverse.
        rule: From `rule_of`.
    """
    runs, bits = math.prod(x.shape) // length, int(rule.bits)
    step = int(math.prod(scale.shape) > 1)
    out = namespace(x).empty(runs * length * bits // 8, dtype=namespace(x).uint8)
    function = _function("codes", x)

    def part(start: int, count: int) -> None:
        values = [None if each is None else each.data_ptr() + 4 * start * step for each in (scale, zero)]
        source = x.data_ptr() + start * length * x.itemsize
        function(source, count, length, *values, step, rule, out.data_ptr() + start * length * bits // 8)

    native.in_threads(runs, max(1, WORTH_A_THREAD // length), part)
    return out


def live_codes(x: Array, spec: TensorSpec, rule: CodeRule) -> tuple[Array, Array, Array]:
    """Codes of each row of a contiguous matrix under the scale and zero point of its own range.

    Args:
        x: (rows, length); bfloat16 or float32, on the CPU.
        spec: An integer type of 8 bits under float32 scales.
        rule: From `rule_of`.

    Returns:
        Codes, uint8 (rows, length); scale and zero point, float32 (rows,).
    """
    rows, length = x.shape
    xp, function = namespace(x), _function("live_codes", x)
    middle = -1.0  # no zero point that is known
    if spec.symmetric:
        middle = 0.0 if spec.dtype.signed else (spec.dtype.max - spec.dtype.min + 1) / 2
    out, params = xp.empty((rows, length), dtype=xp.uint8), xp.empty((2, rows), dtype=xp.float32)
    source, codes_at, scale_at = x.data_ptr(), out.data_ptr(), params.data_ptr()
    zero_at = scale_at + 4 * rows

    def part(start: int, count: int) -> None:
        at, first = 4 * start, start * length
        places = scale_at + at, zero_at + at, codes_at + first
        function(source + first * x.itemsize, count, length, middle, rule, *places)

    native.in_threads(rows, max(1, WORTH_A_THREAD // length), part)
    scale, zero = params
    return out, scale, zero


def has_live_codes(spec: TensorSpec) -> bool:
    """Return True where `live_codes` makes the scales of a live tensor."""
    whole = not spec.dtype.is_float and spec.dtype.bits == 8 and spec.scale_spec is None
    return whole and spec.dynamic and _is_plain(spec) and spec.scale_type in (ScaleType.float, ScaleType.float32)


def rule_of(spec: TensorSpec, order: Sequence[int] = SEQUENTIAL, shift: float = 0.0) -> CodeRule:
    """Return the rule of the codes of a type of 4 or 8 bits; `shift` is taken from integer ones."""
    dtype = spec.dtype
    rule = CodeRule(low=dtype.min, high=dtype.max, shift=shift, is_float=dtype.is_float, bits=dtype.bits)
    rule.place = (ctypes.c_int32 * 8)(*(list(order).index(k) for k in range(8)))
    if dtype.is_float:
        rule.least, rule.rounder = 2.0**dtype.emin, 1.5 * 2.0 ** (23 - dtype.mbits)
        rule.small = 2.0 ** (dtype.mbits - dtype.emin)
        rule.drop, rule.offset = 23 - dtype.mbits, (127 - dtype.bias) << dtype.mbits
        rule.sign = 1 << (dtype.bits - 1) if dtype.signed else 0
    return rule


def is_compiled() -> bool:
    """Return True where this machine has the compiled passes."""
    return _library() is not None


def _is_plain(spec: TensorSpec) -> bool:
    """Return True where codes follow from one scale, and from a zero point that is a code."""
    dtype = spec.dtype
    plain = not isinstance(dtype, BlockType) and not dtype.is_block and spec.code_spec is None
    return plain and dtype.bits in (4, 8) and not spec.float_zero_point and spec.rounding is RoundType.half_even


def _is_compiled(x: Array) -> bool:
    if not is_torch(x) or x.device.type != "cpu" or dtype_name(x) not in _COMPILED or not x.is_contiguous():
        return False
    if math.prod(x.shape) < WORTH_COMPILING and not _library.cache_info().currsize:
        return False
    torch = sys.modules["torch"]
    return type(x) in (torch.Tensor, torch.nn.Parameter) and is_compiled()


def _run_length(x: Array, spec: TensorSpec) -> int:
    """How many values that lie beside each other share a scale; 0 where those that share one do not."""
    split, shape = spec.split, tuple(x.shape)
    if not all(shape) or not shape or isinstance(split, PerBlock):
        return 0
    if isinstance(split, PerTensor):
        return math.prod(shape[1:])
    if isinstance(split, PerChannel):
        return math.prod(shape[1:]) if split.axis % len(shape) == 0 else 0
    if isinstance(split, PerToken):
        return shape[-1]
    if not isinstance(split, PerGroup) or split.axis % len(shape) != len(shape) - 1:
        return 0
    try:
        count, size = split.split(shape[-1])
    except ShapeError:  # told by who does it instead
        return 0
    return size if count * size == shape[-1] else 0


def _function(name: str, x: Array) -> Any:
    return getattr(_library(), f"{name}_{dtype_name(x)}")


@cache
def _library() -> Any:
    """The compiled passes, or None where they cannot be built."""
    source = Path(__file__).with_name("runs.cpp")
    found: Any = native.loaded(source, "the maker of codes", "torch makes them too.")
    if found is None:
        return None
    pointer, count, rule = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(CodeRule)
    arguments = {
        "ranges": [pointer, count, count, pointer, pointer],
        "codes": [pointer, count, count, pointer, pointer, count, rule, pointer],
        "transposed": [pointer, count, count, count, pointer, pointer, rule, count, pointer],
        "live_codes": [pointer, count, count, ctypes.c_float, rule, pointer, pointer, pointer],
    }
    for name, types in arguments.items():
        for dtype in _COMPILED:
            function = getattr(found, f"{name}_{dtype}")
            function.argtypes, function.restype = types, None
    return found
