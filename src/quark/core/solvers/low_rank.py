"""The matrix of a given rank that is nearest to another one (Eckart and Young 1936), without all singular values.

A ~ U S V^T        the `rank` largest singular values: no matrix of that rank is nearer in the Frobenius norm
Z <- orth(A^T orth(A Z))      repeated: Z tends to the leading right singular vectors    (Halko et al. 2011,
                                                                           arXiv:0909.4061, algorithm 4.4)
"""

from __future__ import annotations

import numpy as np

from quark.core.array import Array, like, namespace

BESIDE = 8
"""Vectors beside the rank that are iterated: the error falls with the singular value behind the last of them."""
STEPS = 30
"""Iterations at most."""
CLOSE = 1e-5
"""The iteration ends where a step adds less than this share to what is captured of the squares of A."""


def nearest_of_rank(matrix: Array, rank: int) -> tuple[Array, Array]:
    """(left, right), shapes (rows, rank) and (rank, columns), whose product is the nearest matrix of that rank.

    Args:
        matrix: A, float32 or float64, shape (rows, columns).
        rank: At least 1; where it is above the lesser side, that side takes its place.

    Returns:
        U and S V^T: the columns of the first are orthonormal.
    """
    xp = namespace(matrix)
    rank = min(rank, *matrix.shape)
    width = min(rank + BESIDE, *matrix.shape)
    start = np.random.default_rng(0).standard_normal((matrix.shape[1], width))
    basis, captured = xp.linalg.qr(matrix @ like(start, matrix))[0], 0.0
    for _ in range(STEPS):
        other = xp.linalg.qr(matrix.T @ basis)[0]
        image = matrix @ other
        basis = xp.linalg.qr(image)[0]
        before, captured = captured, float((image * image).sum())
        if captured - before <= CLOSE * captured:
            break
    small = basis.T @ matrix
    left, values, right = xp.linalg.svd(small, full_matrices=False)
    return basis @ left[:, :rank], values[:rank, None] * right[:rank]
