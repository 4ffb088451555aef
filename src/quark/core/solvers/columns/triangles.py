"""Linear systems whose matrix is F, an upper triangle with ones on its diagonal, by products of its blocks.

    F X = B        X_c = F_cc^-1 (B_c - sum_{r > c} F_cr X_r)         c from the last block of columns to the first
    F^T X = B      X_c = F_cc^-T (B_c - sum_{r < c} F_rc^T X_r)       c from the first one on
    Y F^T = D      Y_ic = (D_ic - sum_{r > c} Y_ir F_cr^T) F_cc^-T    of which Y_ij with i < j needs only such

Of 4096 columns three of a hundred products are in the blocks F_cc, whose inverses are found. The rest are products of
matrices, which BLAS has at nearly twice the rate of its own solution, and which may be rounded (`kernels/products.py`).
"""

from __future__ import annotations

from quark.core.array import Array, is_torch, namespace, on_cpu, row_major
from quark.core.solvers.columns.halves import add_product, in_halves

BLOCK, BLOCK_ON_DEVICE = 128, 512
"""Columns whose block of F is inverted, at most; more on a device, where each step is a launch."""
ROWS = 512
"""Rows of Y at most that are found where Y is 0."""


def solve_upper(feedback: Array, right: Array, rounded: bool = False) -> Array:
    """X of F X = B.

    Args:
        feedback: F, shape (..., columns, columns).
        right: B, shape (..., columns, rows), of the dtype of F; not changed.
        rounded: Whether operands of products may be rounded to bfloat16, where that is faster.
    """
    feedback, result = row_major(feedback), row_major(right) * 1.0

    def step(start: int, stop: int) -> None:
        here = _from_the_end(feedback, start, stop)
        result[..., here, :] = _inverse(feedback[..., here, here]) @ result[..., here, :]

    def carry(start: int, middle: int, stop: int) -> None:
        known, rest = _from_the_end(feedback, start, middle), _from_the_end(feedback, middle, stop)
        add_product(result[..., rest, :], feedback[..., rest, known], result[..., known, :], -1, rounded)

    in_halves(0, feedback.shape[-1], step, carry, most=_block(feedback))
    return result


def solve_lower(feedback: Array, right: Array, rounded: bool = False) -> Array:
    """X of F^T X = B; see `solve_upper`."""
    feedback, result = row_major(feedback), row_major(right) * 1.0

    def step(start: int, stop: int) -> None:
        here = slice(start, stop)
        result[..., here, :] = _transposed(_inverse(feedback[..., here, here])) @ result[..., here, :]

    def carry(start: int, middle: int, stop: int) -> None:
        known, rest = slice(start, middle), slice(middle, stop)
        sides = _transposed(feedback[..., known, rest])
        add_product(result[..., rest, :], sides, result[..., known, :], -1, rounded)

    in_halves(0, feedback.shape[-1], step, carry, most=_block(feedback))
    return result


def solve_right(right: Array, feedback: Array, above: bool = False, rounded: bool = False, unit: bool = True) -> Array:
    """Y of Y F^T = D, in the place of D.

    Args:
        right: D, shape (..., rows, columns), of the dtype of F and with contiguous rows; overwritten.
        feedback: F, shape (..., columns, columns), with contiguous rows.
        above: Whether nothing but what is above the diagonal is needed, a third of the work; the rest is then 0.
        rounded: Whether operands of products may be rounded to bfloat16, where that is faster.
        unit: Whether the diagonal of F has ones, which are not read.
    """
    every = right.shape[-2]

    def step(start: int, stop: int) -> None:
        here = _from_the_end(feedback, start, stop)
        rows = slice(here.stop if above else every)
        right[..., rows, here] = right[..., rows, here] @ _transposed(_inverse(feedback[..., here, here], unit))

    def carry(start: int, middle: int, stop: int) -> None:
        known, rest = _from_the_end(feedback, start, middle), _from_the_end(feedback, middle, stop)
        for begin in range(rest.start, rest.stop, ROWS if above else feedback.shape[-1]):
            some = slice(begin, min(begin + ROWS, rest.stop) if above else rest.stop)
            rows, sides = slice(some.stop if above else every), _transposed(feedback[..., some, known])
            add_product(right[..., rows, some], right[..., rows, known], sides, -1, rounded)

    in_halves(0, feedback.shape[-1], step, carry, most=_block(feedback))
    if not above:
        return right
    return right.triu_(1) if is_torch(right) else namespace(right).triu(right, 1)


def _block(matrix: Array) -> int:
    return BLOCK if on_cpu(matrix) else BLOCK_ON_DEVICE


def _from_the_end(matrix: Array, start: int, stop: int) -> slice:
    """Columns that are as far from the last one as these are from the first."""
    return slice(matrix.shape[-1] - stop, matrix.shape[-1] - start)


def _inverse(block: Array, unit: bool = True) -> Array:
    """Of a block on the diagonal of F."""
    xp = namespace(block)
    if not is_torch(block):
        return xp.linalg.inv(block)
    one = xp.eye(block.shape[-1], dtype=block.dtype, device=block.device).expand(block.shape)
    return xp.linalg.solve_triangular(block, one, upper=True, unitriangular=unit)


def _transposed(matrix: Array) -> Array:
    return namespace(matrix).swapaxes(matrix, -1, -2)
