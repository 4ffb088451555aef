"""The rules by which a kernel fake-quantizes a tensor: where its scales lie, and how they follow from its values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from quark.core.dtypes import DTYPES, MICRO_EXPONENT, Dtype
from quark.core.granularity import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quark.core.kernels.element_rule import ElementRule
from quark.core.scales import narrow_scale
from quark.core.spec import ScaleRule, ScaleType, TensorSpec

LONGEST = 1 << 31
"""Columns are counted in 32 bits."""
WIDEST = 1 << 14
"""Values of a group that a program holds at once."""
RANGE, SHARED, PAIRS, WIDE = range(4)
"""How a live scale is found: from the range, as the exponent of a block, as that of pairs, as that of BFP16."""
_MANTISSA_BITS = {"": 23, "float16": 10, "bfloat16": 7}
"""Of the types that a scale is rounded to by a shift; "": float32, so that it stays."""


@dataclass(frozen=True)
class Runs:
    """Values of a contiguous tensor in rows, and which scale each has.

    scale of the value at (row, column) = scale[(row // run % period) * groups + column // size]
    """

    rows: int
    length: int
    size: int
    groups: int = 1
    run: int = 1
    period: int = 1

    @classmethod
    def of(cls, split: Granularity, shape: tuple[int, ...]) -> Runs | None:
        """Of a tensor of that shape; None where scales do not follow each other so.

        Raises:
            ShapeError: The split does not fit the shape.
        """
        split.scale_shape(shape)
        if not shape or 0 in shape or shape[-1] >= LONGEST:
            return None
        rows, last = math.prod(shape[:-1]), shape[-1]
        if isinstance(split, PerTensor):
            return cls(rows, last, last, run=rows)
        if isinstance(split, PerToken):
            return cls(rows, last, last, period=rows)
        if isinstance(split, PerChannel):
            axis = split.axis % len(shape)
            inner = math.prod(shape[axis + 1 :])
            return cls(math.prod(shape[: axis + 1]), inner, inner, period=shape[axis]) if inner < LONGEST else None
        if isinstance(split, PerGroup) and split.axis % len(shape) == len(shape) - 1:
            groups, size = split.split(last)
            return cls(rows, last, size, groups, period=rows)
        if isinstance(split, PerBlock):
            height, width = split.size
            if rows % height or last % width or (len(shape) > 2 and shape[-2] % height):
                return None  # a ragged last tile
            return cls(rows, last, width, last // width, run=height, period=rows // height)
        return None


@dataclass(frozen=True)
class StoredRule:
    """Of values under scales that are given.

    Attributes:
        runs: Where they lie.
        element: How a value becomes a code.
    """

    runs: Runs
    element: ElementRule


@dataclass(frozen=True)
class LiveRule:
    """Of values under scales of their own; as `StoredRule`.

    Attributes:
        scale: The arguments of the kernel that say how a scale is found.
    """

    runs: Runs
    element: ElementRule
    scale: dict[str, Any]


def live_scale(spec: TensorSpec, dtype: str) -> dict[str, Any] | None:
    """The arguments that say how the scale of a group follows from its values; None where no kernel knows.

    Args:
        spec: Of the tensor.
        dtype: Of the tensor, to which a scale of its type is rounded.
    """
    name, element = spec.dtype.name, spec.dtype
    if name in MICRO_EXPONENT:
        return _arguments(PAIRS, steps=element.bits - 2)
    if name == "bfp16":
        return _arguments(WIDE)
    if spec.scale_type is ScaleType.float8_e8m0fnu:
        return _arguments(SHARED, **_shared_exponent(element, spec.scale_rule))
    if element.is_block or spec.scale_spec is not None or not (spec.symmetric and element.signed):
        return None
    if spec.scale_type in (ScaleType.pof2, ScaleType.int16):
        return None
    reach = float(element.max if element.is_float else (element.max - element.min) / 2)
    rounded = narrow_scale(spec, dtype)
    if rounded in _MANTISSA_BITS:
        return _arguments(RANGE, reach=reach, narrow=_MANTISSA_BITS[rounded])
    if not element.is_float:
        return None
    narrow = DTYPES[rounded]
    return _arguments(
        RANGE,
        reach=reach,
        narrow_low=float(narrow.min),
        narrow_high=float(narrow.max),
        narrow_bits=narrow.mbits,
        narrow_power=2.0**narrow.emin,
    )


def _shared_exponent(element: Dtype, rule: ScaleRule) -> dict[str, Any]:
    """How an E8M0 scale follows from the largest magnitude of its block."""
    mantissa, emax, steps = (element.mbits, element.emax, 0) if element.is_float else (8, 0, element.emax)
    even = rule is ScaleRule.even
    return {
        "added": 1 << (22 - mantissa) if even else 0, "up": rule is ScaleRule.ceil, "emax": emax, "steps": steps,
        "at_zero": not even,
    }  # fmt: skip


def _arguments(kind: int, **given: Any) -> dict[str, Any]:
    none: dict[str, Any] = {
        "added": 0, "up": False, "emax": 0, "steps": 0, "at_zero": False, "reach": 1.0, "narrow": 23,
        "narrow_low": 0.0, "narrow_high": 0.0, "narrow_bits": -1, "narrow_power": 0.0,
    }  # fmt: skip
    return {"kind": kind, **none, **given}
