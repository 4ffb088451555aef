"""Looks for NaN and infinity in tensors where they pass on their way: what is decoded, and what is written."""

from __future__ import annotations

import math

import torch

from quark.core.array import row_chunks

_LEAST_CODE = {
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7C,
}
"""Type of a byte -> the least code, without its sign, that is no finite number."""
_ONLY_CODE = {torch.float8_e8m0fnu: 0xFF, torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80}
"""Type of a byte -> the one code that is no number."""
_PIECE = 1 << 20
"""Bytes that are looked at together: they are in the cache of a core when they are copied."""


def is_finite(x: torch.Tensor) -> bool:
    """Return True where no value is NaN or infinite; of integers, and of a tensor on the meta device, always.

    Args:
        x: Of any shape and type. A sum is looked at, which costs a fifth of copying; the values themselves only where
            it is not finite.
    """
    if x.is_meta or not x.numel() or not (x.is_floating_point() or x.is_complex()):
        return True
    if x.is_complex():
        return is_finite(torch.view_as_real(x))
    if x.dtype in _LEAST_CODE:
        return int((x.view(torch.uint8) & 0x7F).amax()) < _LEAST_CODE[x.dtype]
    if x.dtype in _ONLY_CODE:
        return not bool((x.view(torch.uint8) == _ONLY_CODE[x.dtype]).any())
    total = x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32))
    return math.isfinite(total) or all(bool(part.isfinite().all()) for part in _pieces(x))


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


def _pieces(x: torch.Tensor) -> list[torch.Tensor]:
    flat = x.reshape(-1)
    return [flat[piece] for piece in row_chunks(len(flat), x.itemsize, _PIECE)]
