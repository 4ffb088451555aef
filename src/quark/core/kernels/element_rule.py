"""The rule by which one value becomes a code, in the words of compiled loops and kernels."""

from __future__ import annotations

import ctypes

from quark.core.blocks.block_types import BlockType
from quark.core.rounding import RoundType
from quark.core.spec import TensorSpec


class ElementRule(ctypes.Structure):
    """`Grid` of columns.cpp."""

    _fields_ = (
        ("min", ctypes.c_float),
        ("max", ctypes.c_float),
        ("divide", ctypes.c_int32),
        ("zero_before", ctypes.c_int32),
        ("zero_after", ctypes.c_int32),
        ("zero_decoded", ctypes.c_int32),
        ("float_bits", ctypes.c_int32),
        ("smallest_power", ctypes.c_float),
    )

    @classmethod
    def of(cls, spec: TensorSpec) -> ElementRule | None:
        """The rule of a spec; None where numpy and torch must serve."""
        dtype = spec.dtype
        if spec.rounding is not RoundType.half_even or spec.is_cast or spec.code_spec is not None:
            return None
        if dtype.is_float:
            return (
                None
                if dtype.ebits == 8
                else cls(dtype.min, dtype.max, float_bits=dtype.mbits, smallest_power=2.0**dtype.emin)
            )
        if dtype.bits > 16 or isinstance(dtype, BlockType):
            return None  # the compiled loops know no minimums and no tables
        shifted = spec.has_zero_point and not (spec.symmetric and dtype.signed)
        before = spec.float_zero_point
        return cls(dtype.min, dtype.max, dtype.is_block, before, shifted and not before, shifted, -1, 0.0)
