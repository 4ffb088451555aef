"""Products of bfloat16 matrices with float32 sums, on processors that have an instruction for them (AVX-512 BF16).

    total_ij += share * sum_t left_ti right_tj        a product of two bfloat16 numbers is exact in float32

PyTorch multiplies such matrices on a CPU to bfloat16 results only, which are too coarse for second moments, or as
float32. The instruction does twice the products of float32 in the same time. Sums are float32 as there, in another
order. Where a caller may round float32 operands, they are rounded as they are read. products.cpp has the code; what
does not fit it, the caller multiplies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from quark.base import native
from quark.core.array import Array, dtype_name, is_torch, on_cpu

WORTH_COMPILING = 512
"""Columns from which on a model is a real one, which is worth a second of compiling, once on a machine."""
PANEL, LEAST = 32, 16
"""Columns that the code takes at once, and so many of them that are worth a thread."""


def fits(total: Array, *operands: Array) -> bool:
    """Return True where `add_products` takes a matrix to be added to and its operands, or columns of them."""
    return total.shape[-1] >= WORTH_COMPILING and _takes(total, operands, ("bfloat16",))


def fits_rounded(total: Array, *operands: Array) -> bool:
    """Return True where `add_products` takes operands that may be float32, for a matrix that `serves` takes."""
    large = min(*total.shape, *(min(x.shape) for x in operands)) >= PANEL
    return large and _takes(total, operands, ("bfloat16", "float32"))


def _takes(total: Array, operands: Sequence[Array], types: Sequence[str]) -> bool:
    if not all(is_torch(x) and on_cpu(x) and x.ndim == 2 for x in (total, *operands)):
        return False
    lies = total.stride(1) == 1 and all(1 in x.stride() for x in operands)
    return (
        lies
        and dtype_name(total) == "float32"
        and all(dtype_name(x) in types for x in operands)
        and _library() is not None
    )


def serves(matrix: Array) -> bool:
    """Return True where a matrix is one of a real model, and this machine has the code."""
    return is_torch(matrix) and on_cpu(matrix) and matrix.shape[-1] >= WORTH_COMPILING and _library() is not None


def add_products(total: Array, left: Array, right: Array, share: float, upper: bool = False) -> None:
    """Add share * left^T right to total.

    Args:
        total: Shape (rows, columns), float32; its rows may be strided.
        left, right: Shapes (tokens, rows) and (tokens, columns), bfloat16, or float32, which is rounded to bfloat16;
            one of the axes is contiguous.
        share: Factor on the products.
        upper: Whether what is below the diagonal is not needed; what it then holds is not to be read.
    """
    columns, operands = total.shape[1], (*_as_it_lies(left), *_as_it_lies(right))

    def part(start: int, count: int) -> None:
        _library().add_products(
            *operands, len(left), share, total.data_ptr(), total.stride(0), len(total),
            start * PANEL, min((start + count) * PANEL, columns), upper,
        )  # fmt: skip

    native.in_threads(-(-columns // PANEL), LEAST, part)


def _as_it_lies(matrix: Array) -> tuple[int, int, bool, bool]:
    """Address, stride, whether it is float32, and whether the tokens of a channel lie side by side."""
    rows = matrix.stride(1) != 1
    return matrix.data_ptr(), matrix.stride(1 if rows else 0), dtype_name(matrix) == "float32", rows


@cache
def _library() -> Any:
    """The compiled code; None where it cannot be built, or the processor lacks the instruction."""
    source = Path(__file__).with_name("products.cpp")
    found: Any = native.loaded(source, "products of bfloat16", "They are found in float32.")
    if found is None:
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    found.has_pairs.restype = ctypes.c_int32
    flag = ctypes.c_int32
    operand = (pointer, count, flag, flag)
    found.add_products.argtypes = (
        *(*operand, *operand, count, ctypes.c_float, pointer),
        *(count, count, count, count, flag),
    )
    found.add_products.restype = None
    return found if found.has_pairs() else None
