"""Refinement: coordinate descent on a solution of GPTQ, column by column, all others fixed.

    objective   (W - Q) H (W - Q)^T
    column      q_i <- quantize(q_i + ((W - Q) H)_i / H_ii)                       Behdin et al. 2023 (arXiv:2309.01885)
    group       scales of g *= 1 + q_g ((W - Q) H)_g / (q_g H_gg q_g)             codes as they are

Arrays hold the columns of W as rows, and may have leading axes, as in `gptq.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from quark.core.array import Array, astype, namespace, row_major
from quark.core.solvers.columns.block_solvers import alignment, block_solver, grid_of_block
from quark.core.solvers.columns.halves import add_product, in_halves
from quark.core.solvers.gptq import Rounder

Fit = Callable[[int, Array], Array]


def refine(
    weight: Array | None,
    quantized: Array,
    hessian: Array,
    rounder: Rounder,
    passes: int,
    size: int = 0,
    fit: Fit | None = None,
    gradient: Array | None = None,
    rounded: bool = False,
) -> Array:
    """Coordinate descent on (W - Q) H (W - Q)^T from a first solution: each column is rounded again, others fixed.

        q_i <- quantize(q_i + ((W - Q) H)_i / H_ii)

    The best value of a column with all others fixed, so no step makes the objective larger (Behdin et al. 2023,
    arXiv:2309.01885). With `fit`, the scales of a group of columns are fitted before its columns are visited: the
    factor f of least objective with all codes as they are,

        f = 1 + q_g ((W - Q) H)_g / (q_g H_gg q_g)        q_g the quantized columns of group g, one f for each row

    Args:
        weight, quantized: Transposed, shape (..., columns, rows). One pass from a known gradient needs no weight.
        hessian: Damped H in the same order, shape (..., columns, columns).
        rounder: Quantizes one column of what it is given.
        passes: How often all columns are visited.
        size: Neighbouring columns of a group; 0 for all.
        fit: (group, factors (..., rows)) -> the factors by which the scales of `rounder` really changed.
        gradient: H (W - Q) of the first solution, where it is known; overwritten.
        rounded: Whether H and what changes may be rounded to bfloat16 where the gradient of later columns follows it.
            A column is then visited off by some thousandths of how far others moved, most of which do not.
    """
    hessian = row_major(astype(hessian, "float32"))
    descent = _Descent(weight, row_major(quantized) * 1.0, hessian, rounder, size, fit, rounded)
    for _ in range(passes):
        descent.run(None if gradient is None else row_major(gradient))
        gradient = None
    return descent.result


class _Descent:
    """One pass after the other of `refine`."""

    def __init__(
        self,
        weight: Array | None,
        result: Array,
        hessian: Array,
        rounder: Rounder,
        size: int,
        fit: Fit | None,
        rounded: bool,
    ) -> None:
        self.weight, self.result, self.hessian, self.rounder = weight, result, hessian, rounder
        self.fit, self.rounded, self.columns = fit, rounded, result.shape[-2]
        self.size = size or self.columns
        self.change, self.gradient = namespace(result).empty_like(result), result
        self.blocks = block_solver(rounder, result)
        self.align = alignment(self.blocks, rounder)
        self.most = self.blocks.most if self.align == 1 else min(self.blocks.most, self.align)

    def run(self, gradient: Array | None = None) -> None:
        """Visit all columns once, from the gradient as it is now, where that is known."""
        if gradient is None:
            assert self.weight is not None, "a gradient that is not known is found of the weight"
            gradient = self.hessian @ (self.weight - self.result)
        self.gradient = gradient
        in_halves(0, -(-self.columns // self.size), self._refine_groups, self._carry_groups)

    def _refine_groups(self, first: int, last: int) -> None:
        """Fit the scales of a group, then visit its columns."""
        for group in range(first, last):
            start, stop = group * self.size, min(group * self.size + self.size, self.columns)
            here, before = slice(start, stop), None
            if self.fit is not None:
                before = self.result[..., here, :] * 1.0
                arrays = (self.result[..., here, :], self.gradient[..., here, :], self.hessian[..., here, here])
                _fit_group(*arrays, group, self.fit)
            in_halves(start, stop, self._step, self._carry, self.align, self.most)
            if before is not None:
                self.change[..., here, :] = before - self.result[..., here, :]

    def _step(self, start: int, stop: int) -> None:
        """Visit a block of columns."""
        here = slice(start, stop)
        grid = grid_of_block(self.rounder, start, stop, self.result)
        solved, slope, change = (x[..., here, :] for x in (self.result, self.gradient, self.change))
        self.blocks.refine(grid, solved, slope, change, self.hessian[..., here, here])

    def _carry(self, start: int, middle: int, stop: int) -> None:
        left, right = slice(start, middle), slice(middle, stop)
        add_product(
            self.gradient[..., right, :], self.hessian[..., right, left], self.change[..., left, :], 1, self.rounded
        )

    def _carry_groups(self, first: int, middle: int, last: int) -> None:
        self._carry(first * self.size, middle * self.size, min(last * self.size, self.columns))


def _fit_group(result: Array, gradient: Array, hessian: Array, group: int, fit: Fit) -> None:
    """Fit the scales of one group, and move its values and their gradient with them."""
    xp = namespace(result)
    pushed = hessian @ result
    push, curve = (result * gradient).sum(-2), (result * pushed).sum(-2)
    factor = fit(group, xp.clip(1 + push / xp.where(curve > 0, curve, xp.inf), 0.5, 2.0))
    result *= factor[..., None, :]
    gradient -= pushed * (factor[..., None, :] - 1)
