"""Blocks of columns as kernels of a GPU, each of which is checked before it is trusted; see core/kernels/trust.py.

The first block of a width that one solves under a rule, for which it is compiled anew, is compared with the formulas,
by itself:

    every code          quantize_elements(v) = q, bit for bit, of the very v that the kernel says it rounded
    every v             |v - (w + F^T (t - q) + P^T v)| <= (n + 2) 2^-24 (|w| + |F|^T |t - q| + |P|^T |v|)

The sums in float64; the bound is that of float32 sums of n products in any order (Higham 2002, section 3.1). So it does
not matter that one code beside a tie changes all columns after it: no second solution is compared. A device that is
refused takes the steps of `plain_columns.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quark.core.array import Array, astype, dtype_name, namespace
from quark.core.kernels.element_rule import ElementRule
from quark.core.kernels.trust import Trust, device_of, kernel_module
from quark.core.quantize import quantize_elements
from quark.core.solvers.columns.columns import ColumnGrid, has_rule
from quark.core.solvers.columns.plain_columns import PlainBlocks

PLAIN = PlainBlocks()
MODULE = "quark.core.solvers.columns.columns_triton"
UNIT = 2.0**-24
"""Of float32: half of the distance from 1 to the next number."""


class Kernels:
    """Blocks of columns in one launch each, on the devices that have passed.

    Attributes:
        trust: Which have.
    """

    most, shares = PLAIN.most, False

    def __init__(self) -> None:
        self.trust = Trust("solve columns", "They are solved in more and shorter steps there, by the same formulas.")

    def takes(self, rounder: Any, work: Array) -> bool:
        device = device_of(work)
        if (
            device is None
            or device in self.trust.refused
            or not hasattr(rounder, "block")
            or not has_rule(rounder.spec)
        ):
            return False
        return dtype_name(work) == "float32" and work.ndim <= 3 and kernel_module(MODULE) is not None

    def solve(
        self,
        grid: ColumnGrid,
        work: Array,
        target: Array,
        missed: Array,
        result: Array,
        feedback: Array,
        pull: Array | None,
    ) -> None:
        def right(before: list[Array]) -> Array:
            return is_solved(grid, before[0], work, target, missed, result, feedback, pull)

        name = "solve" if pull is None else "solve with drift"
        self._run(name, grid, "solve", [work, target, missed, result], [feedback, pull], right)

    def refine(self, grid: ColumnGrid, result: Array, gradient: Array, change: Array, hessian: Array) -> None:
        def right(before: list[Array]) -> Array:
            return is_refined(grid, before[0], before[1], result, gradient, change, hessian)

        self._run("refine", grid, "refine", [result, gradient, change], [hessian], right)

    def _run(
        self,
        name: str,
        grid: ColumnGrid,
        way: str,
        columns: list[Array],
        squares: list[Array | None],
        right: Callable[[list[Array]], Array],
    ) -> None:
        """Run a kernel that may be trusted, or the plain steps.

        Args:
            name: Of the kernel.
            grid: Of the columns.
            way: Its function, less `_block`, and that of the plain steps.
            columns: What it reads and writes.
            squares: What it reads.
            right: Columns as they were -> whether what it wrote is right, an array.
        """
        device, rule = device_of(columns[0]), ElementRule.of(grid.spec)
        assert device is not None and rule is not None

        def prepare() -> tuple[Callable[[], Array], Callable[[], None]]:
            before = [x * 1.0 for x in columns]

            def undo() -> None:
                for now, old in zip(columns, before, strict=True):
                    now[...] = old

            return (lambda: right(before)), undo

        self.trust.run(
            device,
            (name, columns[0].shape[-2], bytes(rule)),
            lambda: getattr(kernel_module(MODULE), f"{way}_block")(grid, *columns, *squares),
            lambda: getattr(PLAIN, way)(grid, *columns, *squares),
            prepare,
        )


def is_solved(
    grid: ColumnGrid,
    weight: Array,
    work: Array,
    target: Array,
    missed: Array,
    result: Array,
    feedback: Array,
    pull: Array | None,
) -> Array:
    """Return True where a block is solved as the top of this file says; an array of one bool.

    Args:
        grid: Of the block.
        weight: `work` before.
        target: What was missed counts from.
        work, missed, result: What was found, (..., columns, rows).
        feedback, pull: F and P of the block.
    """
    xp, columns = namespace(work), work.shape[-2]
    terms = [(xp.triu(feedback, 1), missed)]
    if pull is not None:
        terms.append((xp.triu(pull, 1), work))
    codes = (quantize_elements(work, grid.scale, grid.zero, grid.spec) == result).all()
    return codes & _is_sum(work, weight, terms, columns) & (missed == target - result).all()


def is_refined(
    grid: ColumnGrid, before: Array, slope: Array, result: Array, gradient: Array, change: Array, hessian: Array
) -> Array:
    """Return True where the columns of a block were visited as `refine.py` says; an array of one bool.

    Args:
        grid: Of the block.
        before, slope: `result` and `gradient` before.
        result, gradient, change: What was found, (..., columns, rows).
        hessian: H of the block.
    """
    xp = namespace(result)
    wanted = before + gradient / xp.diagonal(hessian, 0, -2, -1)[..., None]
    codes = (quantize_elements(wanted, grid.scale, grid.zero, grid.spec) == result).all()
    sums = _is_sum(gradient, slope, [(xp.triu(hessian, 1), change)], result.shape[-2])
    return codes & sums & (change == before - result).all()


def _is_sum(found: Array, first: Array, terms: list[tuple[Array, Array]], count: int) -> Array:
    """Return True where found = first + sum of left^T right, as far as float32 tells; `count` products in each."""
    xp = namespace(found)
    exact = astype(first, "float64")
    size = abs(exact)
    for left, right in terms:
        left, right = xp.swapaxes(astype(left, "float64"), -1, -2), astype(right, "float64")
        exact, size = exact + left @ right, size + abs(left) @ abs(right)
    return (abs(found - exact) <= (len(terms) * count + 2) * UNIT * size).all()
