"""Grids of columns, and the compiled inner blocks of the column solvers; columns.cpp has their code.

A block of columns is solved in one call where the arrays are float32 on the CPU, wide enough to be worth it, and this
machine has a compiler. Codes are those of `core/quantize.py`, bit for bit; what was carried between columns is summed
in another order than a matrix product sums it, so a value within float32 of a tie may get the code beside it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from quark.base import native
from quark.core.array import Array, chunk_bytes_for, dtype_name, is_torch, namespace, on_cpu
from quark.core.kernels.element_rule import ElementRule
from quark.core.quantize import quantize_elements
from quark.core.spec import TensorSpec

BLOCK = 64
"""Columns of a block."""
WORTH_COMPILING = 256
"""Columns of a problem from which on its blocks are compiled: it then comes from a real model."""
WORTH_CALLING = 1 << 16
"""Errors of candidates that are worth a call, and a thread."""
_SLICE = 512
"""Rows that are worth a thread."""


@dataclass
class ColumnGrid:
    """The values that columns may take: what quantizes column i of W, rows of arrays (..., columns, rows).

    Attributes:
        spec: The element type and the rules.
        scale, zero: Of every element, shape (..., columns, rows), float32.
        shared: So many neighbouring columns, counted from the first, have the same scale and zero in each row.
    """

    spec: TensorSpec
    scale: Array
    zero: Array | None
    shared: int = 1

    def __call__(self, index: int, work: Array) -> Array:
        zero = None if self.zero is None else self.zero[..., index, :]
        return quantize_elements(work[..., index, :], self.scale[..., index, :], zero, self.spec)

    def block(self, start: int, stop: int, work: Array) -> ColumnGrid:
        """The grid of columns start to stop."""
        zero = None if self.zero is None else self.zero[..., start:stop, :]
        of_one = start // self.shared == (stop - 1) // self.shared
        shared = stop - start if of_one else self.shared if start % self.shared == 0 else 1
        return ColumnGrid(self.spec, self.scale[..., start:stop, :], zero, shared)


def compiled_for(rounder: Any, work: Array, least: int | None = None) -> bool:
    """Return True where blocks of columns of `work` are solved by compiled code under that rounder.

    Args:
        rounder: What rounds columns.
        work: The columns, shape (..., columns, rows).
        least: Columns from which on that is worth it; None: WORTH_COMPILING.
    """
    least = WORTH_COMPILING if least is None else least
    if not hasattr(rounder, "block") or work.shape[-2] < least or not _is_plain(work):
        return False
    return ElementRule.of(rounder.spec) is not None and _library() is not None


def has_rule(spec: TensorSpec) -> bool:
    """Return True where each element is rounded on its own, by steps that a compiled loop can take."""
    return ElementRule.of(spec) is not None


def compiles(spec: TensorSpec) -> bool:
    """Return True where this machine compiles blocks of columns of that element type."""
    return ElementRule.of(spec) is not None and _library() is not None


def solve_block(
    grid: ColumnGrid, work: Array, target: Array, missed: Array, result: Array, feedback: Array, pull: Array | None
) -> None:
    """Solve the columns of one block; see `gptq.solve`.

    Args:
        grid: Of these columns.
        work, target, missed, result: The columns, shape (..., columns, rows), views of contiguous arrays.
        feedback, pull: Of these columns, shape (..., columns, columns).
    """
    rule, (columns, rows) = ElementRule.of(grid.spec), work.shape[-2:]

    def part(own: list[Any], start: int, count: int) -> None:
        now, goal, error, solved, spread, drift, scale, zero = own
        _library().solve_columns(
            *(_address(x, start) for x in (now, goal, error, solved)),
            _address(spread), _address(drift), _address(scale, start), _address(zero, start),
            _stride(now), _stride(scale), _stride(spread), columns, count, rule,
        )  # fmt: skip

    _each((work, target, missed, result, feedback, pull, grid.scale, grid.zero), rows, part)


def refine_block(grid: ColumnGrid, result: Array, gradient: Array, change: Array, hessian: Array) -> None:
    """Visit the columns of one block again; see `refine.refine`.

    Args:
        grid: Of these columns.
        result, gradient, change: The columns, shape (..., columns, rows), views of contiguous arrays.
        hessian: Of these columns, shape (..., columns, columns), symmetric.
    """
    rule, (columns, rows) = ElementRule.of(grid.spec), result.shape[-2:]

    def part(own: list[Any], start: int, count: int) -> None:
        solved, slope, moved, sides, scale, zero = own
        _library().refine_columns(
            *(_address(x, start) for x in (solved, slope, moved)),
            _address(sides), _address(scale, start), _address(zero, start),
            _stride(solved), _stride(scale), _stride(sides), columns, count, rule,
        )  # fmt: skip

    _each((result, gradient, change, hessian, grid.scale, grid.zero), rows, part)


def solve_coupled_block(grid: ColumnGrid, columns: Sequence[Array], feedback: Array, of_rows: Array) -> None:
    """Solve the columns of one block whose rows depend on each other; see `coupled.solve_coupled`.

    Args:
        grid: Of these columns.
        columns: Work, offset, target, missed, lost and result, each (columns, rows), of one stride.
        feedback: Of these columns, shape (columns, columns).
        of_rows: Of these rows, shape (rows, rows), contiguous.
    """
    arrays = (*columns, feedback, of_rows, grid.scale, grid.zero)
    strides = (_stride(columns[0]), _stride(grid.scale), _stride(feedback))
    _library().solve_coupled(*map(_address, arrays), *strides, *columns[0].shape, ElementRule.of(grid.spec))


def couple_block(
    grid: ColumnGrid, result: Array, gradient: Array, change: Array, hessian: Array, scores: Array
) -> None:
    """Visit the columns of one block whose rows depend on each other; see `coupled.refine_coupled`.

    Args:
        grid: Of these columns.
        result, gradient, change: The columns, shape (columns, rows), views of contiguous arrays.
        hessian: Of these columns, shape (columns, columns), symmetric.
        scores: Of these rows, shape (rows, rows), symmetric, contiguous.
    """
    columns, rows = result.shape
    arrays = (result, gradient, change, hessian, scores, grid.scale, grid.zero)
    strides = (_stride(result), _stride(grid.scale), _stride(hessian))
    _library().couple_columns(*map(_address, arrays), *strides, columns, rows, ElementRule.of(grid.spec))


def part_errors(
    values: Array, importance: Array, scale: Array, zero: Array | None, spec: TensorSpec, size: int
) -> Array | None:
    """sum_i importance_i (Q(x_i) - x_i)^2 of each run of `size` values; None where it is not compiled.

    Args:
        values: Contiguous, float32.
        importance: One for each value along the last axis, or the shape of values; any strides.
        scale, zero: One for each run.
        spec: The element type and the rules.
        size: Values of a run, which is a part of one row.
    """
    rule = ElementRule.of(spec)
    whole = importance.shape == values.shape
    fits = whole or tuple(importance.shape) in ((values.shape[-1],), (1, values.shape[-1]))
    if not whole and fits:
        importance = importance.reshape(-1) * 1.0  # may be the diagonal of a matrix, a view with strides
    arrays = [values, importance, scale, *([] if zero is None else [zero])]
    if values.shape[-1] < WORTH_COMPILING and values.shape[-1] != size:
        return None
    if rule is None or not fits or not all(_is_plain(x) and _contiguous(x) for x in arrays) or _library() is None:
        return None
    xp, parts, period = namespace(values), scale.reshape(-1).shape[0], importance.reshape(-1).shape[0]
    errors = xp.empty_like(scale)

    per_row = values.shape[-1] // size
    native.in_threads(
        parts,
        max(_SLICE // per_row, 1) * per_row,
        lambda start, count: _library().part_errors(
            _address(values, start * size), _address(importance, start * size if whole else 0), period,
            _address(scale, start), _address(zero, start), count, size, _address(errors, start), rule,
        ),
    )  # fmt: skip
    return errors


def candidate_errors(values: Array, scale: Array, zero: Array | None, spec: TensorSpec, errors: Array) -> None:
    """Q(x) - x of runs of values, each under several scales.

    Args:
        values: (runs, size), float32.
        scale, zero: (runs, candidates), float32.
        spec: The element type and the rules.
        errors: Filled, (runs, candidates, size); contiguous.
    """
    (runs, count, size), rule = errors.shape, ElementRule.of(spec)
    arrays = [values, scale, errors, *([] if zero is None else [zero])]
    fits = runs * count * size >= WORTH_CALLING and all(_is_plain(x) and _contiguous(x) for x in arrays)
    if rule is None or not fits or _library() is None:
        zeros = None if zero is None else zero[..., None]
        errors[...] = quantize_elements(values[:, None], scale[..., None], zeros, spec)
        errors -= values[:, None]
        return

    def part(start: int, rows: int) -> None:
        _library().candidate_errors(
            _address(values, start * size), _address(scale, start * count), _address(zero, start * count),
            rows, count, size, _address(errors, start * count * size), rule,
        )  # fmt: skip

    native.in_threads(runs, max(1, WORTH_CALLING // (count * size)), part)


def candidate_dots(values: Array, scale: Array, zero: Array | None, spec: TensorSpec, other: Array) -> Array:
    """sum_i (Q(x_i) - x_i) other_i of runs of values, each under several scales: (runs, candidates).

    Args:
        values, other: (runs, size), float32.
        scale, zero: (runs, candidates), float32.
        spec: The element type and the rules.
    """
    (runs, count), size, rule = scale.shape, values.shape[-1], ElementRule.of(spec)
    arrays = [values, scale, other, *([] if zero is None else [zero])]
    fits = runs * count * size >= WORTH_CALLING and all(_is_plain(x) and _contiguous(x) for x in arrays)
    if rule is None or not fits or _library() is None:
        return _dots_of_errors(values, scale, zero, spec, other)
    dots = namespace(scale).empty_like(scale)

    def part(start: int, rows: int) -> None:
        _library().candidate_dots(
            _address(values, start * size), _address(other, start * size), _address(scale, start * count),
            _address(zero, start * count), rows, count, size, _address(dots, start * count), rule,
        )  # fmt: skip

    native.in_threads(runs, max(1, WORTH_CALLING // (count * size)), part)
    return dots


def _dots_of_errors(values: Array, scale: Array, zero: Array | None, spec: TensorSpec, other: Array) -> Array:
    """sum_i (Q(x_i) - x_i) other_i, (runs, candidates), from errors that are made, of a few runs at a time."""
    xp, parts = namespace(values), []
    step = max(1, chunk_bytes_for(values) // (4 * values.shape[-1] * scale.shape[-1]))
    for start in range(0, len(values), step):
        here = slice(start, start + step)
        errors = xp.stack([values[here]] * scale.shape[-1], 1)
        candidate_errors(values[here], scale[here], None if zero is None else zero[here], spec, errors)
        parts.append((errors @ other[here][..., None])[..., 0])
    return xp.concatenate(parts)


def row_dots(left: Array, right: Array) -> Array:
    """sum_i x_i y_i along the last axis."""
    rows, size = math.prod(left.shape[:-1]), left.shape[-1]
    fits = rows * size >= WORTH_CALLING and all(_is_plain(x) and _contiguous(x) for x in (left, right))
    if not fits or _library() is None:
        return (left * right).sum(-1)
    dots = namespace(left).empty_like(left[..., 0])

    def part(start: int, count: int) -> None:
        at = start * size
        _library().row_dots(_address(left, at), _address(right, at), count, size, _address(dots, start))

    native.in_threads(rows, max(1, WORTH_CALLING // size), part)
    return dots


def _each(arrays: tuple[Array | None, ...], rows: int, part: Callable[[list[Any], int, int], None]) -> None:
    """Run `part` on the arrays of each problem, rows over threads."""
    lead = arrays[0].shape[:-2] if arrays[0] is not None else ()
    for problem in np.ndindex(lead):
        own = [None if x is None else x[problem] for x in arrays]
        native.in_threads(rows, _SLICE, lambda start, count, own=own: part(own, start, count))  # type: ignore[misc]


def _is_plain(x: Array) -> bool:
    return dtype_name(x) == "float32" and on_cpu(x)


def _contiguous(x: Array) -> bool:
    return bool(x.is_contiguous() if is_torch(x) else x.flags.c_contiguous)


def _address(x: Array | None, offset: int = 0) -> int | None:
    if x is None:
        return None
    return int(x.data_ptr() if is_torch(x) else x.ctypes.data) + 4 * offset


def _stride(x: Array) -> int:
    """Floats from one row of a matrix to the next; rows are contiguous."""
    return int(x.stride(-2) if is_torch(x) else x.strides[-2] // x.itemsize)


@cache
def _library() -> Any:
    """The compiled blocks, or None where they cannot be built."""
    source = Path(__file__).with_name("columns.cpp")
    found: Any = native.loaded(source, "the column solver", "numpy and torch solve columns too.")
    if found is None:
        return None
    pointer, count, rule = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ElementRule)
    found.solve_columns.argtypes = [pointer] * 8 + [count] * 5 + [rule]
    found.refine_columns.argtypes = [pointer] * 6 + [count] * 5 + [rule]
    found.solve_coupled.argtypes = [pointer] * 10 + [count] * 5 + [rule]
    found.couple_columns.argtypes = [pointer] * 7 + [count] * 5 + [rule]
    found.part_errors.argtypes = [pointer, pointer, count, pointer, pointer, count, count, pointer, rule]
    found.candidate_errors.argtypes = [pointer] * 3 + [count] * 3 + [pointer, rule]
    found.candidate_dots.argtypes = [pointer] * 4 + [count] * 3 + [pointer, rule]
    found.row_dots.argtypes = [pointer, pointer, count, count, pointer]
    exported = ("solve_columns", "refine_columns", "couple_columns", "part_errors", "candidate_errors")
    for name in (*exported, "solve_coupled", "candidate_dots", "row_dots"):
        getattr(found, name).restype = None
    return found
