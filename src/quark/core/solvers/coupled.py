"""Refinement under the second moments of both sides of a layer: those of what it reads, and of its output's scores.

    objective   tr( G (W - Q) H (W - Q)^T )     H = X X^T of the inputs, G = sum of g g^T of the scores g = d log p / dy
    first       q_rj = quantize( v_rj + sum_{s < r} (v_sj - q_sj) R_sr ),   v_j as in `gptq.py`,   G = R diag(e) R^T
    element     Q_rj <- quantize( Q_rj + (G (W - Q) H)_rj / (G_rr H_jj) )                all others fixed
    group       scales of g *= f,   M f = s + M 1,   M_rs = G_rs q_rg H_gg q_sg,   s_r = q_rg (H (W - Q)^T G)_gr

G x H is the Fisher matrix of a layer's weight in its Kronecker form (Martens and Grosse 2015, arXiv:1503.05671), so the
objective is, to second order, what the rounding does to the distribution that the model gives; rounding by it is
Tseng et al. 2025 (arXiv:2505.22988). With G = 1 it is that of `refine.py`.

Rows depend on each other here. ROWS neighbouring ones are solved together, column by column, and in a column row by
row; what the rows before and after them are off is in the gradient that they start from. Each step is the best value of
one element, so the objective never grows. Arrays hold the columns of W as rows, as in `gptq.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from quark.core.array import Array, like, namespace
from quark.core.solvers.columns.columns import (
    BLOCK,
    WORTH_COMPILING,
    ColumnGrid,
    compiled_for,
    couple_block,
    solve_coupled_block,
)
from quark.core.solvers.columns.halves import add_product, in_halves

ROWS = 64
"""Rows of W that are solved together."""
ELEMENTS = 1 << 12
"""Elements that are worth compiling: one by one they take a second."""
_RIDGE = 1e-6
"""Share of the mean of its diagonal that M gets, whose groups may be all 0."""

Fit = Callable[[int, Array], Array]
"""(group, factors of its scales, (rows,)) -> the factors by which they really changed."""


def trace_and_square(moments: Array) -> tuple[Array, Array]:
    """The trace of second moments and the sum of their squares, which `shrunk` reads; on their device."""
    return namespace(moments).diagonal(moments).sum(), (moments * moments).sum()


def shrunk(moments: Array, fourth: float, count: int, sums: tuple[float, float] | None = None) -> Array:
    """Second moments of few samples drawn to a multiple of the identity, as far as they are noise.

        m I + (1 - rho) (G - m I),   m = tr G / n,   rho = min(1, (sum |g|^4 / T - |G|^2) / (T |G - m I|^2))

    of G = sum g g^T / T: the least expected square error (Ledoit and Wolf 2004, J. Multivariate Analysis 88). What so
    few samples cannot tell then counts the same, as it does without scores.

    Args:
        moments: T G, shape (n, n).
        fourth: sum |g|^4.
        count: T.
        sums: What `trace_and_square` gives, where that is read already, with that of others.

    Returns:
        The same times T, a new array.
    """
    size = len(moments)
    trace, square = map(float, sums or trace_and_square(moments))
    mean = trace / size
    away = square - size * mean**2  # T^2 |G - m I|^2
    noise = (count * fourth - square) / count
    rho = min(1.0, max(0.0, noise / away)) if away > 0 else 1.0
    result = moments * (1 - rho)
    result.reshape(-1)[:: size + 1] += rho * mean  # its diagonal
    return result


def solve_coupled(
    weight: Array, feedback: Array, of_rows: Array, grid_of: Callable[[slice], tuple[ColumnGrid, Fit | None]]
) -> Array:
    """A first solution: what a column or a row is off, those after it make up for.

        tr(G E H E^T) = sum_rj e_r d_j (u_rj - q_rj)^2,     u_rj what is rounded      as R^T E F is lower triangular

    Args:
        weight: W transposed, shape (columns, rows), float32, columns in the order of F.
        feedback: F of `gptq.factor` for H, shape (columns, columns).
        of_rows: F of `gptq.factor` for G, shape (rows, rows): R.
        grid_of: Rows -> their grid, columns in that order.

    Returns:
        The quantized values, shape (columns, rows).
    """
    xp = namespace(weight)
    result, lost = xp.zeros_like(weight), xp.zeros_like(weight)
    for start in range(0, weight.shape[1], ROWS):
        rows = slice(start, min(start + ROWS, weight.shape[1]))
        offset = lost[:, :start] @ of_rows[:start, rows]
        part = _First(weight[:, rows] * 1.0, offset, feedback, of_rows[rows, rows] * 1.0, grid_of(rows)[0])
        result[:, rows], lost[:, rows] = part.result, part.lost
    return result


def _worth_compiling(columns: Array) -> int:
    """The least number of columns, as long as these, that are."""
    return min(WORTH_COMPILING, ELEMENTS // columns.shape[1])


class _First:
    """The first solution of some rows.

    Attributes:
        result: It.
        lost: What was to be rounded, without what other rows add, less what it became.
    """

    def __init__(self, target: Array, offset: Array, feedback: Array, of_rows: Array, grid: ColumnGrid) -> None:
        self.target, self.offset, self.feedback, self.of_rows, self.grid = target, offset, feedback, of_rows, grid
        zeros = namespace(target).zeros_like
        self.work, self.missed, self.lost, self.result = target * 1.0, zeros(target), zeros(target), zeros(target)
        self.blocks = compiled_for(grid, target, _worth_compiling(target))
        in_halves(0, len(target), self._step, self._carry, 1, BLOCK if self.blocks else 1)

    def _step(self, start: int, stop: int) -> None:
        here = slice(start, stop)
        if self.blocks:
            columns = (self.work, self.offset, self.target, self.missed, self.lost, self.result)
            grid = self.grid.block(start, stop, self.result)
            solve_coupled_block(grid, [x[here] for x in columns], self.feedback[here, here], self.of_rows)
            return
        for row in range(self.target.shape[1]):
            self.result[start, row] = self.work[start, row] + self.offset[start, row]
            self.result[start, row] = self.grid(start, self.result)[row]
            self.lost[start, row] = self.work[start, row] - self.result[start, row]
            self.offset[start, row + 1 :] += self.lost[start, row] * self.of_rows[row, row + 1 :]
        self.missed[start] = self.target[start] - self.result[start]

    def _carry(self, start: int, middle: int, stop: int) -> None:
        left, right = slice(start, middle), slice(middle, stop)
        add_product(self.work[right], self.feedback[left, right].T, self.missed[left])


def refine_coupled(
    weight: Array,
    quantized: Array,
    hessian: Array,
    scores: Array,
    of_rows: Callable[[slice], tuple[ColumnGrid, Fit | None]],
    passes: int,
    size: int = 0,
) -> Array:
    """Coordinate descent on tr(G (W - Q) H (W - Q)^T) from a first solution.

    Args:
        weight, quantized: Transposed, shape (columns, rows), float32.
        hessian: Damped H, shape (columns, columns).
        scores: Damped G, shape (rows, rows).
        of_rows: Rows -> their grid and, where their scales are to be fitted before a group is visited, what does it.
        passes: How often all elements are visited.
        size: Columns of a group; 0: all.

    Returns:
        The quantized values, shape (columns, rows).
    """
    result = quantized * 1.0
    for _ in range(passes):
        for start in range(0, weight.shape[1], ROWS):
            rows = slice(start, min(start + ROWS, weight.shape[1]))
            grid, fit = of_rows(rows)
            gradient = hessian @ ((weight - result) @ scores[:, rows])
            part = _Rows(result[:, rows] * 1.0, gradient, hessian, scores[rows, rows] * 1.0, grid)
            part.refine_all(size or len(weight), fit)
            result[:, rows] = part.result
    return result


class _Rows:
    """Some rows, in one pass.

    Attributes:
        result: Their values, (columns, rows).
        gradient: H (W - Q)^T G of them.
        change: What each column changed, times G of these rows.
    """

    def __init__(self, result: Array, gradient: Array, hessian: Array, scores: Array, grid: ColumnGrid) -> None:
        self.result, self.gradient, self.hessian, self.scores, self.grid = result, gradient, hessian, scores, grid
        self.change = namespace(result).zeros_like(result)
        self.blocks = compiled_for(grid, result, _worth_compiling(result))

    def refine_all(self, size: int, fit: Fit | None) -> None:
        """Visit all columns, group by group."""
        columns = len(self.result)
        for start in range(0, columns, size):
            here, rest = slice(start, min(start + size, columns)), slice(start + size, columns)
            before = self.result[here] * 1.0
            if fit is not None:
                self._fit(here, start // size, fit)
            in_halves(here.start, here.stop, self._step, self._carry, 1, BLOCK if self.blocks else 1)
            self.change[here] = (before - self.result[here]) @ self.scores
            if rest.start < columns:
                add_product(self.gradient[rest], self.hessian[rest, here], self.change[here])

    def _fit(self, here: slice, group: int, fit: Fit) -> None:
        """Fit the scales of a group, of all rows at once, and move its values and their gradient with them."""
        xp, values = namespace(self.result), self.result[here]
        pushed = self.hessian[here, here] @ values
        form = self.scores * (values.T @ pushed)
        ridge = _RIDGE * xp.diagonal(form).mean() + like([1e-30], form)[0]
        places = range(len(form))
        form[places, places] += ridge
        push = (values * self.gradient[here]).sum(0)
        factor = fit(group, xp.clip(1 + xp.linalg.solve(form, push[:, None])[:, 0], 0.5, 2.0))
        self.result[here] = values * factor
        self.gradient[here] -= (pushed * (factor - 1)) @ self.scores

    def _step(self, start: int, stop: int) -> None:
        """Visit one column, or a block of them."""
        here = slice(start, stop)
        if self.blocks:
            grid = self.grid.block(start, stop, self.result)
            result, gradient, change = (x[here] for x in (self.result, self.gradient, self.change))
            couple_block(grid, result, gradient, change, self.hessian[here, here], self.scores)
            return
        result, gradient, own = self.result[start], self.gradient[start], self.hessian[start, start]
        before = result * 1.0
        for row in range(len(result)):
            was = result[row] * 1.0
            result[row] += gradient[row] / (self.scores[row, row] * own)
            result[row] = self.grid(start, self.result)[row]
            gradient += (own * (was - result[row])) * self.scores[row]
        self.change[start] = (before - result) @ self.scores

    def _carry(self, start: int, middle: int, stop: int) -> None:
        left, right = slice(start, middle), slice(middle, stop)
        add_product(self.gradient[right], self.hessian[right, left], self.change[left])
