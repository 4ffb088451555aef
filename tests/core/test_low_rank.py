"""The nearest matrix of a rank, against the singular values of numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quark.core.solvers.low_rank import ROUGH, nearest_of_each

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


@pytest.mark.parametrize("shape", [(60, 90), (90, 60)])
def test_a_matrix_that_is_weighed_is_not_made_and_a_start_is_only_one(shape: tuple[int, int]) -> None:
    """Beside the singular values of torch, from a right start, and from one that is orthogonal to the answer."""
    draw = torch.Generator().manual_seed(3)
    matrix = torch.randn(shape, generator=draw, dtype=torch.float64)
    weighing = torch.randn(shape[1], shape[1], generator=draw, dtype=torch.float64).tril() * 0.1 + torch.eye(shape[1])
    weighed = matrix @ weighing
    _, values, right = torch.linalg.svd(weighed, full_matrices=False)
    for start in (right[:4], right[-4:]):
        ((left, found),) = nearest_of_each([matrix], 4, weighing=weighing, starts=[start])
        missed = (weighed - left @ found).square().sum()
        assert values[4:].square().sum() * (1 - 1e-9) <= missed <= values[4:].square().sum() * 1.02


def test_related_matrices_go_on_from_each_other() -> None:
    """Roughly, of columns that are scaled more and more: most of what singular values could hold is captured."""
    draw = torch.Generator().manual_seed(4)
    matrix, grows = torch.randn(60, 90, generator=draw, dtype=torch.float64), torch.linspace(0, 3, 90).double().exp()
    every = [matrix * grows**power for power in torch.linspace(0, 1, 8).tolist()]
    for one, (left, right) in zip(every, nearest_of_each(every, 8, close=ROUGH, related=True), strict=True):
        values = torch.linalg.svdvals(one).square()
        assert (left @ right).square().sum() >= 0.95 * values[:8].sum()
