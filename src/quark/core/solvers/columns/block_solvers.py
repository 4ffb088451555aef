"""Solvers of a block of columns: compiled code, a kernel, or steps of numpy and torch, by arrays and element type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from quark.core.array import Array
from quark.core.solvers.columns import columns
from quark.core.solvers.columns.kernels import Kernels
from quark.core.solvers.columns.plain_columns import WORTH_SHARING, OneByOne, PlainBlocks


class BlockSolver(Protocol):
    """One way to solve a block of columns.

    Attributes:
        most: Columns that it takes at once.
        shares: Whether a block is cheaper where its columns share their scales.
    """

    @property
    def most(self) -> int: ...

    @property
    def shares(self) -> bool: ...

    def takes(self, rounder: Any, work: Array) -> bool:
        """Return True where it solves columns of `work`, shape (..., columns, rows), under that rounder."""

    def solve(
        self,
        grid: Any,
        work: Array,
        target: Array,
        missed: Array,
        result: Array,
        feedback: Array,
        pull: Array | None,
    ) -> None:
        """Solve the columns of one block; see `gptq.solve`.

        Args:
            grid: What `grid_of_block` gives for these columns.
            work: What columns are now, shape (..., columns, rows); becomes what they were when they were rounded.
            target: What the missed part of a column counts from.
            missed, result: Filled.
            feedback, pull: F and P of these columns, shape (..., columns, columns).
        """

    def refine(self, grid: Any, result: Array, gradient: Array, change: Array, hessian: Array) -> None:
        """Visit the columns of one block again; see `refine.refine`.

        Args:
            grid: What `grid_of_block` gives for these columns.
            result: Values of the columns, shape (..., columns, rows); overwritten.
            gradient: H (W - Q) of them; overwritten.
            change: Filled: what they were less what they are.
            hessian: H of these columns, shape (..., columns, columns), symmetric.
        """


class CompiledBlocks:
    """The code of columns.cpp, for float32 arrays on the CPU."""

    most, shares = columns.BLOCK, False

    def takes(self, rounder: Any, work: Array) -> bool:
        return columns.compiled_for(rounder, work)

    solve = staticmethod(columns.solve_block)
    refine = staticmethod(columns.refine_block)


SOLVERS: Sequence[BlockSolver] = (CompiledBlocks(), Kernels(), PlainBlocks(), OneByOne())
"""The first that takes the columns solves them; the last takes all."""


def block_solver(rounder: Any, work: Array) -> BlockSolver:
    """Return the solver of blocks of columns of `work`, shape (..., columns, rows), under a rounder."""
    return next(solver for solver in SOLVERS if solver.takes(rounder, work))


def grid_of_block(rounder: Any, start: int, stop: int, work: Array) -> Any:
    """Return the rounder of a block's columns: (column of the block, columns of the block) -> values of that column."""
    if hasattr(rounder, "block"):
        return rounder.block(start, stop, work)
    return lambda index, _: rounder(start + index, work)


def alignment(solver: BlockSolver, rounder: Any) -> int:
    """Columns that are kept together, from multiples of which on blocks begin."""
    shared = getattr(rounder, "shared", 1)
    return int(shared) if solver.shares and shared >= WORTH_SHARING else 1
