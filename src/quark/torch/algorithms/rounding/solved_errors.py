"""How much of its output each solved layer loses, beside what the nearest rounding would lose."""

from __future__ import annotations

import torch

from quark.core.quantize import fake_quantize
from quark.core.scales import QParams
from quark.core.solvers import gptq
from quark.core.spec import TensorSpec
from quark.torch.algorithms.rounding.column_problem import ColumnProblem
from quark.torch.algorithms.rounding.coupled_rows import goal_of


def layer_errors(
    problem: ColumnProblem,
    name: str,
    weight: torch.Tensor,
    solved: torch.Tensor,
    nearest: tuple[QParams, TensorSpec],
    factor: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The share that the nearest rounding loses and the one that the solution does, (2,), where the weight is.

    Args:
        problem: That the layer belongs to, whose inputs' second moments are there.
        name: Full name of the layer.
        weight: The float weight, shape (rows, columns).
        solved: The one that the layer has now.
        nearest: Scales and spec of the nearest rounding.
        factor: F and d of the problem, in its order.
    """
    rows = gptq.some_rows(len(weight))
    # What is lost is counted from the weight that does best on these inputs.
    goal = goal_of(problem, name, weight, factor, rows)
    before = fake_quantize(weight, *nearest)[rows]
    gram = problem.group.gram
    return torch.stack([gptq.output_error(goal, rounded, gram) for rounded in (before, solved[rows])])
