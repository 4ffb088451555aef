"""The nearest matrix of a rank, against the singular values of numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quark.core.solvers.low_rank import nearest_of_each

RANDOM = np.random.default_rng(0)


def lost(matrix: np.ndarray, rank: int) -> tuple[float, float]:
    """Squares that the approximation misses, and the least that any of that rank misses (Eckart and Young)."""
    ((left, right),) = nearest_of_each([matrix], rank)
    values = np.linalg.svd(matrix, compute_uv=False)
    return float(((matrix - left @ right) ** 2).sum()), float((values[rank:] ** 2).sum())


@pytest.mark.parametrize("shape", [(40, 64), (64, 40), (5, 200)])
@pytest.mark.parametrize("rank", [1, 4])
def test_it_misses_no_more_than_singular_values_say(shape: tuple[int, int], rank: int) -> None:
    # Slowly falling singular values, which are the hard case, and a few large ones.
    matrix = RANDOM.standard_normal(shape)
    matrix += 5 * np.outer(RANDOM.standard_normal(shape[0]), RANDOM.standard_normal(shape[1]))
    found, least = lost(matrix, rank)
    assert least * (1 - 1e-9) <= found <= least * 1.02


def test_a_matrix_of_that_rank_is_met() -> None:
    matrix = RANDOM.standard_normal((50, 6)) @ RANDOM.standard_normal((6, 30))
    assert lost(matrix, 6)[0] <= 1e-20 * (matrix**2).sum()


def test_the_left_side_is_orthonormal_and_the_rank_is_bounded() -> None:
    ((left, right),) = nearest_of_each([torch.from_numpy(RANDOM.standard_normal((8, 20))).float()], 30)
    assert (tuple(left.shape), tuple(right.shape)) == ((8, 8), (8, 20))
    torch.testing.assert_close(left.T @ left, torch.eye(8))
