"""Looks for NaN and infinity in tensors where they pass on their way: what is decoded, and what is written."""

from __future__ import annotations

import math

import torch

_LEAST_CODE = {
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7C,
}
"""Type of a byte -> the least code, without its sign, that is no finite number."""
_ONLY_CODE = {torch.float8_e8m0fnu: 0xFF, torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80}
"""Type of a byte -> the one code that is no number."""


def is_finite(x: torch.Tensor) -> bool:
    """Return True where no value is NaN or infinite; of integers, and of a tensor on the meta device, always.

    Args:
        x: Of any shape and type. The least and the largest value are looked at, which NaN both become: in half types
            that takes half as long as copying, and a sum in float32 ten times as long.
    """
    if x.is_meta or not x.numel() or not (x.is_floating_point() or x.is_complex()):
        return True
    if x.is_complex():
        return is_finite(torch.view_as_real(x))
    if x.dtype in _LEAST_CODE:
        return int((x.view(torch.uint8) & 0x7F).amax()) < _LEAST_CODE[x.dtype]
    if x.dtype in _ONLY_CODE:
        return not bool((x.view(torch.uint8) == _ONLY_CODE[x.dtype]).any())
    least, largest = torch.aminmax(x.detach())
    return math.isfinite(least) and math.isfinite(largest)


def may_be_written(x: torch.Tensor) -> bool:
    """Return True for what a weight file may hold: finite numbers; one bound that nothing meets; or a mask.

    Args:
        x: Of any shape and type. A mask holds infinities, and beside them zeros and ones alone.
    """
    if is_finite(x):
        return True
    values = x.float() if x.itemsize < 2 else x
    if x.is_complex() or bool(values.isnan().any()):
        return False
    return x.ndim == 0 or bool((values.isinf() | (values == 0) | (values == 1)).all())
