"""The exact choice against every choice there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from quark.core.solvers.choices.knapsack import cheapest_choice
from quark.errors import ConfigError


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_within_the_budget_loses_less(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 6))
    sizes = [random.integers(1, 60, random.integers(1, 5)).tolist() for _ in range(count)]
    losses = [random.random(len(row)).tolist() for row in sizes]
    budget = int(random.integers(sum(map(min, sizes)), sum(map(max, sizes)) + 1))

    def total(rows: list[list[float]], picked: tuple[int, ...]) -> float:
        return sum(row[i] for row, i in zip(rows, picked, strict=True))

    picked = tuple(cheapest_choice(sizes, losses, budget))
    every = itertools.product(*(range(len(row)) for row in sizes))
    least = min(total(losses, other) for other in every if total(sizes, other) <= budget)
    assert total(sizes, picked) <= budget
    assert total(losses, picked) == pytest.approx(least, rel=1e-12)


def test_options_that_lose_the_same_cost_no_bytes() -> None:
    assert cheapest_choice([[9, 3, 5]], [[0.0, 0.0, 0.0]], 9) == [1]


def test_a_budget_that_nothing_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match="7 bytes, above the budget of 6"):
        cheapest_choice([[3, 5], [4, 8]], [[1.0, 0.0], [1.0, 0.0]], 6)
