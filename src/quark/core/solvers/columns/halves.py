"""Columns visited one after the other, their effect on later ones carried over in matrix products.

visit [start, stop):   visit the left half;  carry what it changed to the right half, as one product;  visit that
"""

from __future__ import annotations

from collections.abc import Callable

from quark.core.array import Array, is_torch
from quark.core.kernels import products


def in_halves(
    start: int,
    stop: int,
    step: Callable[[int, int], None],
    carry: Callable[[int, int, int], None],
    align: int = 1,
    most: int = 1,
) -> None:
    """Step through columns, at `most` so many at once; between the left and the right half of every range, `carry`
    what the left one changed.
    """
    if stop - start <= most:
        if stop > start:
            step(start, stop)
        return
    half = (start + stop) // 2
    middle = half // align * align if half // align * align > start else half
    in_halves(start, middle, step, carry, align, most)
    carry(start, middle, stop)
    in_halves(middle, stop, step, carry, align, most)


def add_product(total: Array, left: Array, right: Array, sign: int = 1, rounded: bool = False) -> None:
    """Add sign * left @ right to total, in place and without a copy where torch can.

    Args:
        total: Shape (..., rows, columns).
        left, right: Shapes (..., rows, k) and (..., k, columns).
        sign: 1 or -1.
        rounded: Whether the operands may be rounded to bfloat16, where that is faster; sums are of float32.
    """
    if rounded and total.ndim == 3:
        for own in zip(total, left, right, strict=True):
            add_product(*own, sign, rounded)
    elif rounded and products.fits_rounded(total, left, right):
        products.add_products(total, left.T, right, sign)
    elif is_torch(total) and total.ndim == 2:
        total.addmm_(left, right, alpha=sign)
    elif is_torch(total) and total.ndim == 3:
        total.baddbmm_(left, right, alpha=sign)
    else:
        total += sign * (left @ right)


def add_row_product(total: Array, left: Array, right: Array, sign: int = 1) -> None:
    """Add sign * left @ right to total, in place: a vector times a matrix, in one operation of torch.

    Args:
        total: Shape (..., rows).
        left: Shape (..., columns).
        right: Shape (..., columns, rows).
        sign: 1 or -1.
    """
    if is_torch(total) and total.ndim == 1:
        total.addmv_(right.T, left, alpha=sign)
    elif is_torch(total) and total.ndim == 2:
        total[:, None].baddbmm_(left[:, None], right, alpha=sign)
    else:
        total += sign * (left[..., None, :] @ right)[..., 0, :]
