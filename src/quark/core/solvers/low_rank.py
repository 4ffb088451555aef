"""The matrix of a given rank that is nearest to another one (Eckart and Young 1936), without all singular values.

A ~ U S V^T        the `rank` largest singular values: no matrix of that rank is nearer in the Frobenius norm
Z <- orth(A^T orth(A Z))      repeated: Z tends to the leading right singular vectors    (Halko et al. 2011,
                                                                           arXiv:0909.4061, algorithm 4.4)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from quark.core.array import Array, astype, like, namespace, on_cpu

BESIDE = 8
"""Vectors beside the rank that are iterated: the error falls with the singular value that follows the last of them."""
STEPS = 30
"""Iterations at most."""
CLOSE = 1e-5
"""The iteration ends where a step adds less than this share to what is captured of the squares of A."""


def nearest_of_each(matrices: Iterable[Array], rank: int) -> list[tuple[Array, Array]]:
    """(left, right) of each matrix, shapes (rows, rank) and (rank, columns): their product is the nearest of that rank.

    Args:
        matrices: A, float32 or float64, shape (rows, columns); each is made when it is asked for. Singular values of
            those with as many columns are found together: a device is waited for once, for all of them.
        rank: At least 1; where it is above the lesser side, that side takes its place.

    Returns:
        U and S V^T: the columns of the first are orthonormal.
    """
    found = [_leading(matrix, rank) for matrix in matrices]
    results: dict[int, tuple[Array, Array]] = {}
    for shape in dict.fromkeys(small.shape for _, small in found):
        here = [i for i, (_, small) in enumerate(found) if small.shape == shape]
        stack = namespace(found[here[0]][1]).stack([found[i][1] for i in here])
        left, values, right = namespace(stack).linalg.svd(stack, full_matrices=False)
        kept = slice(min(rank, values.shape[-1]))
        for i, u, s, v in zip(here, left, values, right, strict=True):
            results[i] = (found[i][0] @ u[:, kept], s[kept, None] * v[kept])
    return [results[i] for i in range(len(found))]


def _leading(matrix: Array, rank: int) -> tuple[Array, Array]:
    """Q and Q^T A, the columns of Q being an orthonormal basis of the leading left singular vectors and some more."""
    xp = namespace(matrix)
    width = min(rank + BESIDE, *matrix.shape)
    start = np.random.default_rng(0).standard_normal((matrix.shape[1], width))
    basis, on_host = xp.linalg.qr(matrix @ like(start, matrix))[0], on_cpu(matrix)
    captured: Any = 0.0
    ended: Any = None
    for _ in range(STEPS):
        other = xp.linalg.qr(matrix.T @ basis)[0]
        image = matrix @ other
        # A device is not asked whether to go on: it takes all steps, and those after the end change nothing.
        step = xp.linalg.qr(image)[0]
        basis = step if ended is None else xp.where(ended, basis, step)
        squares = (image * image).sum()
        before, captured = captured, float(squares) if on_host else astype(squares, "float64")
        ends = captured - before <= CLOSE * captured
        if not on_host:
            ended = ends if ended is None else ended | ends
        elif ends:
            break
    return basis, basis.T @ matrix
