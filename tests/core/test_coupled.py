"""Refinement under the second moments of inputs and outputs: its objective, its optimum, and its compiled blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quark.core.quantize import quantize_elements
from quark.core.schemes import SCHEMES
from quark.core.solvers import coupled, gptq
from quark.core.solvers.columns.columns import ColumnGrid
from quark.core.solvers.refine import refine

SPEC = SCHEMES["int3_wo_128"].weight
assert SPEC is not None


class Problem:
    """A random layer of `columns` inputs and `rows` outputs whose channels are correlated on both sides."""

    def __init__(self, columns: int, rows: int) -> None:
        random = np.random.default_rng(0)

        def moments(size: int) -> Any:
            x = random.normal(size=(size, size)) * random.uniform(0.1, 2, size)
            return (x @ x.T / size + 0.05 * np.eye(size)).astype(np.float32)

        self.hessian, self.scores = moments(columns), moments(rows)
        self.weight = random.normal(size=(columns, rows)).astype(np.float32)
        self.scale = np.full((columns, rows), 0.5, np.float32)
        self.nearest = quantize_elements(self.weight, self.scale, None, SPEC)

    def loss(self, quantized: Any) -> float:
        """tr(G E H E^T) as a quadratic form of the Kronecker product."""
        error = (self.weight - np.asarray(quantized)).astype(np.float64)
        if error.size > 1000:
            return float(((error @ self.scores) * (self.hessian @ error)).sum())
        flat = error.reshape(-1)
        return float(flat @ np.kron(self.hessian, self.scores).astype(np.float64) @ flat)

    def grid(self, rows: slice = slice(None)) -> tuple[ColumnGrid, None]:
        """The grid of some rows."""
        return ColumnGrid(SPEC, self.scale[:, rows], None), None

    def refined(self, passes: int) -> Any:
        """The solution from the nearest rounding."""
        return coupled.refine_coupled(self.weight, self.nearest, self.hessian, self.scores, self.grid, passes)


def test_converges_to_values_none_of_which_can_be_bettered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coupled, "ROWS", 4)
    problem = Problem(12, 10)
    losses = [problem.loss(problem.refined(passes)) for passes in (0, 1, 2, 30)]
    assert losses == sorted(losses, reverse=True)
    assert losses[1] < 0.8 * losses[0]
    best = problem.refined(30)
    for column in range(12):
        for row in range(10):
            for code in range(-4, 4):
                other = best.copy()
                other[column, row] = code * 0.5
                assert problem.loss(other) >= losses[-1] * (1 - 1e-5)


def test_independent_outputs_are_refined_as_without_scores() -> None:
    problem = Problem(40, 70)
    problem.scores = np.diag(np.random.default_rng(1).uniform(0.5, 2, 70)).astype(np.float32)
    plain = refine(problem.weight, problem.nearest, problem.hessian, problem.grid()[0], 2)
    np.testing.assert_array_equal(problem.refined(2), plain)


def test_compiled_blocks_give_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(256, 6)
    found = problem.refined(1)
    monkeypatch.setattr(coupled, "compiled_for", lambda *_: False)
    plain = problem.refined(1)
    assert np.mean(found != plain) < 0.002  # sums of another order: a value within float32 of a tie
    assert problem.loss(found) == pytest.approx(problem.loss(plain), rel=1e-4)


def test_numpy_and_torch_agree() -> None:
    problem = Problem(24, 70)
    arrays = [torch.from_numpy(x) for x in (problem.weight, problem.nearest, problem.hessian, problem.scores)]
    scale = torch.from_numpy(problem.scale)
    found = coupled.refine_coupled(*arrays, lambda rows: (ColumnGrid(SPEC, scale[:, rows], None), None), 1)
    np.testing.assert_array_equal(found.numpy(), problem.refined(1))


def solved(problem: Problem) -> Any:
    """The first solution."""
    feedback, of_rows = (gptq.factor(x, 1e-9)[0].astype(np.float32) for x in (problem.hessian, problem.scores))
    return coupled.solve_coupled(problem.weight, feedback, of_rows, problem.grid)


def test_a_first_solution_of_independent_outputs_is_that_of_gptq() -> None:
    problem = Problem(40, 70)
    problem.scores = np.diag(np.random.default_rng(1).uniform(0.5, 2, 70)).astype(np.float32)
    feedback = gptq.factor(problem.hessian, 1e-9)[0].astype(np.float32)
    plain = gptq.solve(problem.weight, feedback, problem.grid()[0])
    assert np.mean(solved(problem) != plain) < 0.002


def test_a_first_solution_is_near_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each u - q is spread evenly over a step of 0.5 where nothing is clipped: the mean square is 0.25 / 12.
    monkeypatch.setattr(coupled, "ROWS", 4)
    problem = Problem(30, 30)
    problem.weight *= 0.2
    pivots = [gptq.factor(x, 1e-9)[1] for x in (problem.hessian, problem.scores)]
    expected = float(pivots[0].sum() * pivots[1].sum()) * 0.25 / 12
    assert problem.loss(solved(problem)) == pytest.approx(expected, rel=0.25)
    problem.nearest = quantize_elements(problem.weight, problem.scale, None, SPEC)
    assert problem.loss(solved(problem)) < 0.7 * problem.loss(problem.nearest)


def test_compiled_blocks_of_a_first_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(256, 66)
    found = problem.loss(solved(problem))
    monkeypatch.setattr(coupled, "compiled_for", lambda *_: False)
    assert found == pytest.approx(problem.loss(solved(problem)), rel=0.02)


def test_fitted_scales_lower_the_objective() -> None:
    problem = Problem(16, 8)
    factors: list[Any] = []

    def fit(group: int, factor: Any) -> Any:
        factors.append(factor)
        problem.scale[group * 8 : group * 8 + 8] *= factor
        return factor

    rows = coupled._Rows(problem.nearest * 1, np.empty(0), problem.hessian, problem.scores, problem.grid()[0])
    rows.gradient = problem.hessian @ (problem.weight - problem.nearest) @ problem.scores
    for group in range(2):
        before = problem.loss(rows.result)
        expected = problem.hessian @ (problem.weight - rows.result) @ problem.scores
        np.testing.assert_allclose(
            rows.gradient[group * 8 : group * 8 + 8], expected[group * 8 : group * 8 + 8], 1e-3, 1e-3
        )
        rows._fit(slice(group * 8, group * 8 + 8), group, fit)
        assert problem.loss(rows.result) < before
        # The best factors: no small change of one of them is better.
        for row in range(8):
            for change in (0.99, 1.01):
                other = rows.result.copy()
                other[group * 8 : group * 8 + 8, row] *= change
                inside = 0.5 < factors[-1][row] < 2
                assert not inside or problem.loss(other) > problem.loss(rows.result) * (1 - 1e-6)
        rows.gradient = problem.hessian @ (problem.weight - rows.result) @ problem.scores


@pytest.mark.slow  # imports scikit-learn
@pytest.mark.parametrize("count", [5, 60, 4000])
def test_shrunk_moments_are_those_of_scikit_learn(count: int) -> None:
    from sklearn.covariance import ledoit_wolf

    random = np.random.default_rng(count)
    samples = random.normal(size=(count, 12)) @ (random.normal(size=(12, 12)) * np.geomspace(0.3, 3, 12))
    expected, share = ledoit_wolf(samples, assume_centered=True)
    fourth = float(np.square(np.square(samples).sum(1)).sum())
    for xp in (np.asarray, torch.from_numpy):
        moments = xp(samples.T @ samples)
        found = coupled.shrunk(moments, fourth, count)
        np.testing.assert_allclose(found / count, expected, rtol=1e-9)
        assert not np.array_equal(found, moments) and found is not moments
    assert (share > 0.2) == (count == 5) and (share < 0.02) == (count == 4000)
