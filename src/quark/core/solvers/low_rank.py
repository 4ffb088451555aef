"""The matrix of a given rank that is nearest to another one (Eckart and Young 1936), without all singular values.

A ~ U S V^T        the `rank` largest singular values: no matrix of that rank is nearer in the Frobenius norm
Z <- orth(A^T orth(A Z))      repeated: Z tends to the leading right singular vectors    (Halko et al. 2011,
                                                                           arXiv:0909.4061, algorithm 4.4)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from quark.core.array import Array, astype, dtype_name, like, namespace, on_cpu

BESIDE = 8
"""Vectors beside the rank that are iterated: the error falls with the singular value that follows the last of them."""
STEPS = 30
"""Iterations at most."""
CLOSE = 1e-5
"""The iteration ends where a step adds less than this share to what is captured of the squares of A."""
ROUGH = 1e-2
"""The share where matrices are only compared with each other."""
NEAR = 1e-3
"""The share where the iteration starts near to its end."""


def nearest_of_each(
    matrices: Iterable[Array],
    rank: int,
    close: float = CLOSE,
    weighing: Array | None = None,
    starts: Sequence[Array] | None = None,
    related: bool = False,
) -> list[tuple[Array, Array]]:
    """(left, right) of each matrix, shapes (rows, rank) and (rank, columns): their product is the nearest of that rank.

    What it misses of the squares of A is at most what the singular values after the rank hold, and what the iteration
    left to be captured: of a spectrum that is flat, the hardest, one part in a hundred.

    Args:
        matrices: A, float32 or float64, shape (rows, columns); each is made when it is asked for. Singular values of
            those with as many columns are found together: a device is waited for once, for all of them.
        rank: At least 1; where it is above the lesser side, that side takes its place.
        close: Share of what is captured at which the iteration ends.
        weighing: C, shape (columns, columns): the matrix is A C, which is never made. None: A.
        starts: Of each matrix some rows, shape (n, columns), near to those of its nearest one; None: nothing is known.
        related: Whether each matrix is near to the one before with its columns scaled: iterations go on from there.

    Returns:
        U and S V^T: the columns of the first are orthonormal.
    """
    found: list[tuple[Array, Array]] = []
    for index, matrix in enumerate(matrices):
        near = None if starts is None else starts[index].T
        before = found[-1][0] if related and found and len(found[-1][0]) == len(matrix) else None
        found.append(_leading(matrix, rank, close, weighing, near, before))
    results: dict[int, tuple[Array, Array]] = {}
    for shape in dict.fromkeys(small.shape for _, small in found):
        here = [i for i, (_, small) in enumerate(found) if small.shape == shape]
        stack = namespace(found[here[0]][1]).stack([found[i][1] for i in here])
        left, values, right = namespace(stack).linalg.svd(stack, full_matrices=False)
        kept = slice(min(rank, values.shape[-1]))
        for i, u, s, v in zip(here, left, values, right, strict=True):
            results[i] = (found[i][0] @ u[:, kept], s[kept, None] * v[kept])
    return [results[i] for i in range(len(found))]


def _leading(
    matrix: Array, rank: int, close: float, weighing: Array | None, near: Array | None, basis: Array | None
) -> tuple[Array, Array]:
    """Q and B: Q B is A on the leading right singular vectors and some more, the columns of Q are orthonormal.

    Args:
        matrix, rank, close, weighing: As `nearest_of_each` has them.
        near: Columns near to leading right singular vectors.
        basis: A first Q; None: it follows from `near`, and from random columns for what is not known.
    """
    xp, on_host = namespace(matrix), on_cpu(matrix)
    width = min(rank + BESIDE, *matrix.shape)

    def image_of(right: Array) -> Array:
        return matrix @ (right if weighing is None else weighing @ right)

    if basis is None:
        random = np.random.default_rng(0).standard_normal((matrix.shape[1], width))
        start = astype(like(random, matrix), dtype_name(matrix))
        start = start if near is None else xp.concatenate([near, start], 1)[:, :width]
        basis = xp.linalg.qr(image_of(start))[0]
    captured: Any = 0.0
    small: Any = None
    ended: Any = None
    for _ in range(STEPS):
        other = matrix.T @ basis
        other = xp.linalg.qr(other if weighing is None else weighing.T @ other)[0]
        image = image_of(other)
        step, triangle = xp.linalg.qr(image)
        # A device is not asked whether to go on: it takes all steps, and those after the end change nothing.
        basis = step if ended is None else xp.where(ended, basis, step)
        small = triangle @ other.T if ended is None else xp.where(ended, small, triangle @ other.T)
        squares = (image * image).sum()
        before, captured = captured, float(squares) if on_host else astype(squares, "float64")
        ends = captured - before <= close * captured
        if not on_host:
            ended = ends if ended is None else ended | ends
        elif ends:
            break
    return basis, small
