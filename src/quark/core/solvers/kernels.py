"""Blocks of columns as kernels of a GPU, each of which is checked before it is trusted.

A kernel was written on one machine and runs on many, under compilers that change. The first block of a width that it
solves on a kind of device and under a rule, for which it is compiled anew, is held against the formulas, by itself:

    every code          quantize_elements(v) = q, bit for bit, of the very v that the kernel says it rounded
    every v             |v - (w + F^T (t - q) + P^T v)| <= (n + 2) 2^-24 (|w| + |F|^T |t - q| + |P|^T |v|)

The sums in float64; the bound is that of float32 sums of n products in any order (Higham 2002, section 3.1). So it does
not matter that one code beside a tie changes all columns after it: no second solution is compared. Where a kernel
fails, or cannot be compiled, that device takes the steps of `plain_columns.py` from then on, and one warning says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from quark.core.array import Array, astype, dtype_name, is_torch, namespace
from quark.core.quantize import quantize_elements
from quark.core.solvers.columns import ColumnGrid, ColumnRule, has_rule
from quark.core.solvers.plain_columns import PlainBlocks
from quark.log import logger

PLAIN = PlainBlocks()
UNIT = 2.0**-24
"""Of float32: half of the distance from 1 to the next number."""


class Kernels:
    """Blocks of columns in one launch each, on the devices that have passed.

    Attributes:
        passed: (device, kernel, columns of the block, rule) whose first block was right.
        refused: Devices on which one was not.
    """

    most, shares = PLAIN.most, False

    def __init__(self) -> None:
        self.passed: set[tuple[str, str, int, bytes]] = set()
        self.refused: set[str] = set()

    def takes(self, rounder: Any, work: Array) -> bool:
        device = device_of(work)
        if device is None or device in self.refused or not hasattr(rounder, "block") or not has_rule(rounder.spec):
            return False
        return dtype_name(work) == "float32" and work.ndim <= 3 and kernel_module() is not None

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
            return is_solved(grid, before[0], before[1], work, target, missed, result, feedback, pull)

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
        """Run a kernel, if its device is not refused; the first time, check it.

        Args:
            name: Of the kernel, for the warning.
            grid: Of the columns.
            way: Its function, less `_block`, and that of the plain steps.
            columns: What it reads and writes.
            squares: What it reads.
            right: Columns as they were -> whether what it wrote is right, an array.
        """
        device = device_of(columns[0])
        assert device is not None
        plain = getattr(PLAIN, way)
        if device in self.refused:
            plain(grid, *columns, *squares)
            return
        rule = ColumnRule.of(grid.spec)
        assert rule is not None
        kernel, key = getattr(kernel_module(), f"{way}_block"), (device, name, columns[0].shape[-2], bytes(rule))
        if key in self.passed:
            kernel(grid, *columns, *squares)
            return
        before = [x * 1.0 for x in columns]
        why = "what it computes is not what the formulas say"
        try:
            kernel(grid, *columns, *squares)
            passed = bool(right(before))
        except Exception as error:  # noqa: BLE001 - a compiler or a driver fails in ways of its own
            passed, why = False, f"it does not run ({type(error).__name__})"
            logger.debug("The kernel to %s columns on %s: %s", name, device, error)
        if passed:
            self.passed.add(key)
            return
        self.refused.add(device)
        logger.warning(
            "The kernel to %s columns of %s is not used on %s: %s. Columns are solved in more and shorter steps there, "
            "by the same formulas.", name, grid.spec, device, why,
        )  # fmt: skip
        for now, old in zip(columns, before, strict=True):
            now[...] = old
        plain(grid, *columns, *squares)


def device_of(x: Array) -> str | None:
    """What GPU an array is on, as its maker calls it; None where no kernel runs."""
    if not is_torch(x) or x.device.type != "cuda":
        return None
    properties = namespace(x).cuda.get_device_properties(x.device)
    return f"{properties.name} ({properties.major}.{properties.minor})"


@cache
def kernel_module() -> Any:
    """`columns_triton.py`, or None where triton is not there, or not one that it works with.

    Not imported above: triton takes a second, and comes with PyTorch for GPUs alone.
    """
    try:
        return importlib.import_module("quark.core.solvers.columns_triton")
    except (ImportError, AttributeError) as error:
        logger.debug("Columns are solved without kernels: %s", error)
        return None


def is_solved(
    grid: ColumnGrid,
    weight: Array,
    goal: Array,
    work: Array,
    target: Array,
    missed: Array,
    result: Array,
    feedback: Array,
    pull: Array | None,
) -> Array:
    """Whether a block is solved, see above; an array of one bool.

    Args:
        grid: Of the block.
        weight, goal: `work` and `target` before.
        work, target, missed, result: What was found, (..., columns, rows).
        feedback, pull: F and P of the block.
    """
    xp, columns = namespace(work), work.shape[-2]
    terms, drawn = [(xp.triu(feedback, 1), missed)], []
    if pull is not None:
        drawn = [(xp.triu(pull, 1), work)]
        terms += drawn
    codes = (quantize_elements(work, grid.scale, grid.zero, grid.spec) == result).all()
    sums = _is_sum(work, weight, terms, columns) & _is_sum(target, goal, drawn, columns)
    return codes & sums & (missed == target - result).all()


def is_refined(
    grid: ColumnGrid, before: Array, slope: Array, result: Array, gradient: Array, change: Array, hessian: Array
) -> Array:
    """Whether the columns of a block were visited as `refine.py` says; an array of one bool.

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
    """Whether found = first + sum of left^T right, as far as float32 tells; `count` products in each."""
    xp = namespace(found)
    exact = astype(first, "float64")
    size = abs(exact)
    for left, right in terms:
        left, right = xp.swapaxes(astype(left, "float64"), -1, -2), astype(right, "float64")
        exact, size = exact + left @ right, size + abs(left) @ abs(right)
    return (abs(found - exact) <= (len(terms) * count + 2) * UNIT * size).all()
