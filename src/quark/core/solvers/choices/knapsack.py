"""Multiple-choice knapsack: one option of each item, of least total loss, within a budget of bytes; exact.

    min sum_i loss[i, c_i]   over c   subject to   sum_i size[i, c_i] <= budget

States (bytes, loss) of the first items are kept where no other state is at once as small and as good (dynamic
programming over dominance, Nemhauser and Ullmann 1969). A state is dropped when even the Lagrangian bound of the items
that follow,

    bound(room) = sum_j min_c (loss[j, c] + price size[j, c]) - price room,

cannot bring it below a choice that is known. The price is that of the relaxed problem, so few states live.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quark.errors import ConfigError

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

ROUNDING = 1e-12
"""Share of a loss by which sums in another order may differ: no reason to drop a state."""
_HALVINGS = 200
"""Steps of the search for the price: more than there are bits in a float."""


def cheapest_choice(sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int) -> list[int]:
    """The option of each item.

    Args:
        sizes: Bytes of each option of each item.
        losses: What each option costs, at least 0; as many as sizes.
        budget: Bytes.

    Returns:
        Index of an option for each item. Of choices that lose the same, a smallest.

    Raises:
        ConfigError: The smallest options are larger than the budget.
    """
    rows = [np.asarray(row, np.int64) for row in sizes]
    costs = [np.asarray(row, np.float64) for row in losses]
    least = sum(int(row.min()) for row in rows)
    if least > budget:
        raise ConfigError(f"The smallest choice has {least} bytes, above the budget of {budget}.")
    price, known = _price(rows, costs, budget)
    return _states(rows, costs, budget, price, known)


def _priced(rows: list[Integers], costs: list[Floats], price: float) -> tuple[int, float]:
    """Bytes and loss of the options that are best at a price for a byte."""
    picked = [int(np.lexsort((row, cost + price * row))[0]) for row, cost in zip(rows, costs, strict=True)]
    chosen = list(zip(rows, costs, picked, strict=True))
    return sum(int(row[i]) for row, _, i in chosen), sum(float(cost[i]) for _, cost, i in chosen)


def _price(rows: list[Integers], costs: list[Floats], budget: int) -> tuple[float, float]:
    """The least price of a byte at which the best options fit the budget, and what they lose."""
    size, loss = _priced(rows, costs, 0.0)
    if size <= budget:
        return 0.0, loss
    span = max(float(cost.max() - cost.min()) for cost in costs)
    low, high = 0.0, max(span, ROUNDING) * 2
    loss = sum(float(cost[row == row.min()].min()) for row, cost in zip(rows, costs, strict=True))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        size, found = _priced(rows, costs, middle)
        if size <= budget:
            high, loss = middle, min(loss, found)
        else:
            low = middle
    return high, loss


def _states(rows: list[Integers], costs: list[Floats], budget: int, price: float, known: float) -> list[int]:
    """Grow the states item by item; walk back from the best."""
    bounds = np.array([float((cost + price * row).min()) for row, cost in zip(rows, costs, strict=True)])
    smallest = np.array([int(row.min()) for row in rows])
    limit = known + ROUNDING * max(1.0, abs(known))
    used, loss = np.zeros(1, np.int64), np.zeros(1)
    trail: list[tuple[Integers, Integers]] = []
    for index, (row, cost) in enumerate(zip(rows, costs, strict=True)):
        grown = (used[:, None] + row).ravel()
        lost = (loss[:, None] + cost).ravel()
        rest = bounds[index + 1 :].sum() - price * (budget - grown)
        possible = (grown + smallest[index + 1 :].sum() <= budget) & (lost + np.maximum(rest, 0) <= limit)
        at = np.flatnonzero(possible)
        at = at[np.lexsort((lost[at], grown[at]))]
        # Sorted by size, a state lives if it loses less than all that are smaller.
        before = np.minimum.accumulate(np.concatenate([[np.inf], lost[at]]))[:-1]
        at = at[lost[at] < before]
        used, loss = grown[at], lost[at]
        trail.append((at // len(row), at % len(row)))
    state, picked = len(used) - 1, []
    for parents, options in reversed(trail):
        picked.append(int(options[state]))
        state = int(parents[state])
    return picked[::-1]
