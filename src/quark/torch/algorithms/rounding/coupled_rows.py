"""A solved weight refined under the scores of its outputs, too; the algebra is in `core/solvers/coupled.py`."""

from __future__ import annotations

from functools import partial

import torch

from quark.core.scales import QParams
from quark.core.solvers import gptq
from quark.core.solvers.columns.columns import ColumnGrid
from quark.core.solvers.columns.triangles import solve_lower
from quark.core.solvers.coupled import Fit, refine_coupled, solve_coupled
from quark.core.spec import TensorSpec
from quark.torch.algorithms.rounding.column_problem import ColumnProblem
from quark.torch.algorithms.rounding.grids import FittedScales, can_be_fitted, static_grid

DAMPING = 0.01
"""Share of the mean of its diagonal that is added to the scores' second moments."""


def goal_of(
    problem: ColumnProblem, name: str, weight: torch.Tensor, factor: tuple[torch.Tensor, torch.Tensor], rows: slice
) -> torch.Tensor:
    """Some rows of the float weight that does best on the inputs of the layer, float32; see `gptq.moved_target`."""
    goal = weight[rows].float()
    offset = problem.drawn(name, rows, *factor)
    if offset is not None:
        goal[:, problem.order] += solve_lower(factor[0], offset).T
    return goal


def refined_rows(
    problem: ColumnProblem,
    goal: torch.Tensor,
    solved: torch.Tensor,
    params: QParams,
    spec: TensorSpec,
    scores: torch.Tensor,
    factor: tuple[torch.Tensor, torch.Tensor],
    passes: int,
) -> tuple[torch.Tensor, QParams]:
    """A better solution for one layer, and its scales. On the CPU: one element follows from the one before it.

    Args:
        problem: That the layer belongs to, whose inputs' second moments are there.
        goal: The float weight that it comes near to, shape (rows, columns), float32.
        solved: The solution as it is.
        params, spec: Of the solution; no row has a scale in common with another one.
        scores: Second moments of the scores of its outputs, shape (rows, rows).
        factor: F and d of the problem, in its order.
        passes: How often each element is rounded again.
    """
    weights = [[solved.cpu()]]
    on_cpu = QParams(params.scale.cpu(), None if params.zero_point is None else params.zero_point.cpu(), params.second)
    grid = static_grid([[on_cpu]], weights, spec)
    fitted = FittedScales([[on_cpu]], weights, grid) if can_be_fitted(spec) else None

    def of_rows(rows: slice) -> tuple[ColumnGrid, Fit | None]:
        zero = None if grid.zero is None else grid.zero[:, rows]
        return ColumnGrid(spec, grid.scale[:, rows], zero), partial(fitted.fit, rows=rows) if fitted else None

    scores, order, feedback = scores.cpu(), problem.order.cpu(), factor[0].cpu().float()
    columns = goal.cpu().T.contiguous()

    def in_order(rows: slice) -> tuple[ColumnGrid, None]:
        own, _ = of_rows(rows)
        return ColumnGrid(spec, own.scale[order], None if own.zero is None else own.zero[order]), None

    first = torch.empty_like(columns)
    first[order] = solve_coupled(columns[order], feedback, gptq.factor(scores, DAMPING)[0].float(), in_order)
    both = gptq.damped(scores, DAMPING, "float32")
    with problem.damped() as gram:
        found = refine_coupled(columns, first, gram.cpu(), both, of_rows, passes, fitted.size if fitted else 0)
    result = torch.empty_like(solved)
    result.copy_(found.T)
    if fitted is None:
        return result, params
    scale = fitted.fitted()[0][0].scale.to(params.scale.device)
    return result, QParams(scale, params.zero_point, params.second)
