"""GPTQ, GPTAQ and Qronos on layers that read one tensor; the algebra is in `core/solvers/gptq.py`.

Such layers share one Hessian and one factor, and their rows are solved together.
Experts of one shape are solved at once: arrays have an axis for the expert in front where there are several.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import nn

from quark.base.memory_and_disk import give_back_memory
from quark.base.progress import OUTPUT_ERROR, report
from quark.core.checks import later, naming
from quark.core.kernels import products
from quark.core.quantize import fake_quantize
from quark.core.scales import QParams
from quark.core.solvers import gptq
from quark.core.solvers.columns.columns import ColumnGrid, compiles
from quark.core.solvers.columns.triangles import solve_lower
from quark.core.solvers.refine import refine
from quark.core.spec import TensorSpec, by_row
from quark.errors import CalibrationError
from quark.torch.algorithms.base import Block
from quark.torch.algorithms.input_group import InputGroup
from quark.torch.algorithms.layer_weights import freeze_weight, weight_quantizer, weight_spec
from quark.torch.algorithms.rounding.column_problem import (
    ColumnProblem,
    as_read,
    by_spec,
    names_of,
    stacked,
    unstacked,
)
from quark.torch.algorithms.rounding.coupled_rows import goal_of, refined_rows
from quark.torch.algorithms.rounding.fix_scales import chosen_layers, fix_scales
from quark.torch.algorithms.rounding.grids import (
    DynamicGrid,
    FittedScales,
    can_be_fitted,
    dynamic_group,
    joined,
    static_grid,
)
from quark.torch.algorithms.rounding.output_scores import ByScores
from quark.torch.calibration.distributed import shared_parts, shared_work
from quark.torch.layers import QuantLayer

ELEMENTS, LEAST_ROWS = 1 << 21, 256
"""Elements of the weights that are solved at once, and rows, of which there are at least so many."""


class GPTQ(ByScores):
    """GPTQ (Frantar et al. 2022) with act-order and static groups; see `GPTQConfig`."""

    tokens_per_channel, fewest_tokens = 8, 8192
    batches_experts = True
    rounds = True
    solves_after_blocks = True
    needs_compiled = True
    rounds_moved: ClassVar[bool] = True
    """True where the float weight that `pull` moves is rounded itself; else refinement only comes near to it."""
    own: ClassVar[float] = 0.0
    """Share of its own diagonal that the damping of each column has beside that of the mean."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.of_outputs: dict[str, torch.Tensor] = {}

    def enter(self, block: Block) -> None:
        known = self.scores is not None and block.name in self.scores.names  # none of what runs after the blocks
        self.of_outputs = self.scores.of_layers(block) if self.scores is not None and known else {}

    def on_inputs(self, group: InputGroup, block: Block) -> None:
        self.on_expert_inputs([group], block)

    def on_expert_inputs(self, groups: list[InputGroup], block: Block) -> None:
        problems: dict[Any, list[ColumnProblem]] = {}
        for group in groups:
            layers = chosen_layers(group, block, self.config.inside_layer_modules)
            if not layers:
                continue
            with naming(", ".join(layers)):
                group = as_read(group, layers)
                problem = ColumnProblem(group, layers, self._order(group.gram, layers), own=self.own)
                self._add_pulls(problem)
            problems.setdefault(problem.shape, []).append(problem)
        for of_one_shape in problems.values():
            self._solve(of_one_shape, block)

    def _solve(self, problems: list[ColumnProblem], block: Block) -> None:
        feedback, of_order = self._factor(problems)
        with naming(names_of(problems)):
            order = stacked(problem.order for problem in problems)
            importance = torch.empty_like(of_order).scatter_(-1, order, of_order).float()
            layers = {name: layer for problem in problems for name, layer in problem.layers.items()}
            of_layers: dict[str, torch.Tensor] = {}
            for problem, of_columns in zip(problems, unstacked(importance, problems), strict=True):
                of_layers |= dict.fromkeys(problem.layers, of_columns)
            fix_scales(layers, block, of_layers)
            factors = zip(unstacked(feedback, problems), unstacked(of_order, problems), strict=True)
            for problem, factor in zip(problems, factors, strict=True):
                if problem.varied:
                    problem.keep_what_is_learned(*factor)
            rounded = gptq.may_round(feedback.float(), of_order.float())
            drift, drift_rounded = self._drift(problems, feedback, of_order, rounded)
            # float64, where it was needed to find the factor, and what follows from its inverse.
            feedback, of_order = feedback.float(), of_order.float()
            give_back_memory()  # what the factor took beside it
            factors = zip(unstacked(feedback, problems), unstacked(of_order, problems), strict=True)
            offset_rounded = rounded and all(p.may_round_offset(*f) for p, f in zip(problems, factors, strict=True))
            solver = _Solver(self, problems, feedback, of_order, drift, drift_rounded, rounded, offset_rounded)
            for same in zip(*(by_spec(problem.layers) for problem in problems), strict=True):
                solver.round(same)

    def _factor(self, problems: list[ColumnProblem]) -> tuple[torch.Tensor, torch.Tensor]:
        """F and d; where those of several experts cannot be had at once, each is damped by itself."""
        for problem in problems:
            group = problem.group
            problem.damping = gptq.damping_at_least(self.damping(group.gram), group.gram.diagonal(), group.count)
        # What a GPU finds in a moment is sooner found by each than exchanged.
        share = shared_parts if problems[0].group.device.type == "cpu" else gptq.fill_alone
        if len(problems) == 1:
            only = problems[0]
            with naming(names_of(problems)):
                feedback, importance, taken = only.group.found(
                    (self, *map(weight_spec, only.layers.values())),  # from which order and damping follow
                    lambda: gptq.factor(only.group.gram, only.damping, only.order, share, self.own),
                )
            only.damping = cast(Any, taken)
            return feedback, importance
        whole = torch.stack([problem.ordered(problem.group.gram) for problem in problems])
        try:
            dampings: Any = [problem.damping for problem in problems]
            if any(isinstance(damping, torch.Tensor) for damping in dampings):
                # Experts with tokens enough keep the number; new_full waits for no device.
                dampings = torch.stack([d if isinstance(d, torch.Tensor) else whole.new_full((), d) for d in dampings])
            return gptq.factor(whole, dampings, share=share, own=self.own)[:2]
        except CalibrationError:
            alone = [self._factor([problem]) for problem in problems]
            # One may have needed float64.
            feedback, importance = zip(*alone, strict=True)
            return torch.stack([f.double() for f in feedback]), torch.stack([d.double() for d in importance])

    def damping(self, hessian: torch.Tensor) -> float | torch.Tensor:
        """Share of the mean of the diagonal; a number that follows from the moments stays on their device."""
        return float(self.config.damp_percent)

    def _drift(
        self, problems: list[ColumnProblem], feedback: torch.Tensor, importance: torch.Tensor, may_round: bool
    ) -> tuple[torch.Tensor | None, bool]:
        """GPTAQ's matrices P, and whether products with them may be rounded. Here: there are none."""
        return None, False

    def _add_pulls(self, problem: ColumnProblem) -> None:
        """Find what draws each weight, while the moments that it follows from are there. Here: nothing does."""

    def _order(self, hessian: torch.Tensor, layers: dict[str, QuantLayer]) -> torch.Tensor:
        if self.config.desc_act:
            return gptq.importance_order(hessian)
        if self.config.group_aware_order:
            sizes = {dynamic_group(weight_spec(layer)) for layer in layers.values()}
            return gptq.importance_order(hessian, max(sizes) if max(sizes) > 1 else None)
        return torch.arange(len(hessian), device=hessian.device)


class GPTAQ(GPTQ):
    """GPTAQ (Li et al. 2025): GPTQ that also makes up for the drift of the inputs; see `GPTAQConfig`."""

    needs_float = True
    rounds_moved = False

    def _drift(
        self, problems: list[ColumnProblem], feedback: torch.Tensor, importance: torch.Tensor, may_round: bool
    ) -> tuple[torch.Tensor | None, bool]:
        whole, alpha = any(problem.drift_gives_pulls for problem in problems), self.config.alpha
        may_round = may_round and feedback.dtype is torch.float32
        found = []
        factors = zip(unstacked(feedback, problems), unstacked(importance, problems), strict=True)
        for problem, factor in zip(problems, factors, strict=True):
            if not whole:
                problem.add_pulls_of_outputs(alpha)
            drift = problem.group.drift(problem.order, not whole)
            problem.group.forget_float()
            may_round = may_round and gptq.drift_may_round(drift, *factor)
            found.append(gptq.drift_matrix(drift, *factor, alpha, whole, may_round))
            del drift
        drifts = stacked(found)
        if whole:
            for problem, own in zip(problems, unstacked(drifts, problems), strict=True):
                problem.drift = own
        return drifts, may_round


class Qronos(GPTQ):
    """Qronos (Zhang et al. 2025): rounds the weight that does best on the real inputs; see `QronosConfig`."""

    needs_float = True
    own = 0.1  # products of different channels are noisier than squares, and others on other texts

    def damping(self, hessian: torch.Tensor) -> torch.Tensor:
        # alpha counts in the largest eigenvalue; the solver, in the mean of the diagonal.
        added = float(self.config.alpha) * cast(torch.Tensor, gptq.largest_eigenvalue(hessian)).double()
        diagonal = hessian.diagonal()
        # In language models one direction of a few tokens (attention sinks) has up to 1500 times the mean; with a share
        # of that on the diagonal, all other channels would be rounded to nearest.
        median = diagonal.median().double()
        return torch.where(median > 0, added.minimum(median), added) / diagonal.mean().clip(1e-30)

    def _add_pulls(self, problem: ColumnProblem) -> None:
        problem.add_pulls()
        problem.add_varied()
        problem.group.forget_float()  # before the factor is made


@dataclass
class _Solver:
    """Rounds the layers of some problems, some rows at a time: rows are independent, and this bounds the memory.

    Several processes take these pieces in turn.

    Attributes:
        algorithm: With its settings.
        problems: Experts of one shape, or one problem.
        feedback, importance, drift: Of all problems, in the solver's order.
        drift_rounded: Whether products with the drift may be rounded; see `gptq.drift_may_round`.
        rounded: Whether what is carried from column to column may be rounded; see `gptq.may_round`.
        offset_rounded: Whether what is added to columns may be found by rounded products; see
            `ColumnProblem.may_round_offset`.
    """

    algorithm: GPTQ
    problems: list[ColumnProblem]
    feedback: torch.Tensor
    importance: torch.Tensor
    drift: torch.Tensor | None
    drift_rounded: bool
    rounded: bool
    offset_rounded: bool

    def round(self, layers: Sequence[dict[str, QuantLayer]]) -> None:
        """Solve the layers of one spec of each problem."""
        own = [list(of_problem.values()) for of_problem in layers]
        names = [list(of_problem) for of_problem in layers]
        spec, device = weight_spec(own[0][0]), self.feedback.device
        weights = [[cast(nn.Linear, layer).weight.detach().to(device) for layer in some] for some in own]
        qparams = [[cast(QParams, weight_quantizer(layer).params) for layer in some] for some in own]
        solved, found = self._solve(weights, qparams, names, spec)
        factors = zip(unstacked(self.feedback, self.problems), unstacked(self.importance, self.problems), strict=True)
        every = zip(self.problems, factors, names, own, weights, qparams, solved, found, strict=True)
        for problem, factor, *of_layers in every:
            for name, module, weight, before, rounded, parts in zip(*of_layers, strict=True):
                result, scales = self._coupled(problem, name, weight, rounded, joined(parts), spec, factor)
                errors = _layer_errors(problem, name, weight, result, (before, spec), factor)
                later(errors, partial(_report, name))
                freeze_weight(module, result, scales)

    def _solve(
        self,
        weights: list[list[torch.Tensor]],
        qparams: list[list[QParams]],
        names: list[list[str]],
        spec: TensorSpec,
    ) -> tuple[list[list[torch.Tensor]], list[list[list[QParams]]]]:
        """The rounded weights of the layers of each problem, and the scales of the pieces of each."""
        device = self.feedback.device
        solved = [[torch.empty_like(weight) for weight in some] for some in weights]
        found: list[list[list[QParams]]] = [[[] for _ in some] for some in weights]
        all_pieces = self._pieces([len(weight) for weight in weights[0]], spec)
        solve = partial(self._solve_pieces, weights, qparams, names, spec, all_pieces)
        for pieces, (columns, params) in zip(all_pieces, shared_work(len(all_pieces), solve, device), strict=True):
            sizes = [rows.stop - rows.start for _, rows in pieces]
            for problem, of_problem in enumerate(unstacked(columns, self.problems)):
                for (layer, rows), values, one in zip(
                    pieces, torch.split(of_problem, sizes, 1), params[problem], strict=True
                ):
                    solved[problem][layer][rows] = values.to(weights[problem][layer].dtype).T
                    found[problem][layer].append(one)
        return solved, found

    def _solve_pieces(
        self,
        weights: list[list[torch.Tensor]],
        qparams: list[list[QParams]],
        names: list[list[str]],
        spec: TensorSpec,
        all_pieces: list[list[tuple[int, slice]]],
        index: int,
    ) -> tuple[torch.Tensor, list[list[QParams]]]:
        """The values of the pieces of an index, transposed, and their scales."""
        pieces = all_pieces[index]
        some_weights = [[of[layer][rows] for layer, rows in pieces] for of in weights]
        some_params = [[of[layer].rows(rows) for layer, rows in pieces] for of in qparams]
        pulls = [
            torch.cat([problem.pulls[of[layer]][:, rows] for layer, rows in pieces], 1) if problem.pulls else None
            for problem, of in zip(self.problems, names, strict=True)
        ]
        return self._solve_rows(some_weights, some_params, pulls, spec)

    def _coupled(
        self,
        problem: ColumnProblem,
        name: str,
        weight: torch.Tensor,
        values: torch.Tensor,
        params: QParams,
        spec: TensorSpec,
        factor: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, QParams]:
        """A solution and its scales, refined under the scores of the layer's outputs where they are known."""
        scores = self.algorithm.of_outputs.pop(name, None)
        if scores is None or not by_row(spec) or (self.algorithm.config.fisher == "auto" and not compiles(spec)):
            return values, params
        goal = goal_of(problem, name, weight, factor, slice(None))
        passes = self.algorithm.config.refine_passes
        return refined_rows(problem, goal, values, params, spec, scores, factor, passes)

    def _pieces(self, rows: list[int], spec: TensorSpec) -> list[list[tuple[int, slice]]]:
        """(layer, rows) that are solved at once."""
        if not by_row(spec) or spec.scale_spec is not None:
            return [[(layer, slice(0, count)) for layer, count in enumerate(rows)]]
        most, total = max(LEAST_ROWS, ELEMENTS // self.importance.numel()), sum(rows)
        if (count := -(-total // most)) > 1:  # an even number of like pieces, so that two processes have as much to do
            most = max(LEAST_ROWS, -(-total // (count + count % 2)))
        batches: list[list[tuple[int, slice]]] = []
        room = 0
        for layer, count in enumerate(rows):
            start = 0
            while start < count:
                if room == 0:
                    batches.append([])
                    room = most
                take = min(room, count - start)
                batches[-1].append((layer, slice(start, start + take)))
                start, room = start + take, room - take
        return batches

    def _solve_rows(
        self,
        weights: list[list[torch.Tensor]],
        qparams: list[list[QParams]],
        pulls: list[torch.Tensor | None],
        spec: TensorSpec,
    ) -> tuple[torch.Tensor, list[list[QParams]]]:
        """The values of some rows in natural order, transposed, and their scales."""
        config, orders = self.algorithm.config, [problem.order for problem in self.problems]
        weight = self._columns(weights)
        offset = self._offset(pulls, weight) if config.refine_passes or self.algorithm.rounds_moved else None
        group_size, feedback = dynamic_group(spec), self.feedback
        residual = torch.empty_like(weight) if config.refine_passes else None
        added = offset if self.algorithm.rounds_moved else None
        if config.static_groups or group_size == 1:
            grid: Any = static_grid(qparams, weights, spec, orders)
            align = 1
        else:
            grid = DynamicGrid(spec, orders, group_size, weights[0][0].dtype, self.importance)
            align = group_size
        solved = gptq.solve(
            weight, feedback, grid, self.drift, align, residual, self.rounded, added, self.drift_rounded
        )
        if isinstance(grid, DynamicGrid):
            qparams = grid.params([len(weight) for weight in weights[0]])
        del grid, added
        natural, goal, gradient = self._in_natural_order(solved), None, None
        if residual is not None:
            if self.drift is not None and offset is not None:
                residual += offset
            del solved
            if config.refine_passes > 1:  # the first pass starts from the gradient
                moved = weight if offset is None else weight + solve_lower(feedback, offset)
                goal = self._in_natural_order(moved)
                del moved
            del weight, offset
            found = gptq.gradient_of(residual, feedback, self.importance, products.serves(feedback))
            gradient = self._in_natural_order(found)
            del found
            del residual
            grid = static_grid(qparams, weights, spec)
            natural, qparams = self._refined(goal, natural, grid, qparams, weights, gradient)
        return natural, qparams

    def _columns(self, weights: list[list[torch.Tensor]]) -> torch.Tensor:
        """The columns of the weights of each problem in the solver's order, (columns, rows of all), float32."""
        every = []
        for own, problem in zip(weights, self.problems, strict=True):
            columns = own[0].new_empty((own[0].shape[1], sum(map(len, own))), dtype=torch.float32)
            for part, weight in zip(torch.split(columns, [len(weight) for weight in own], 1), own, strict=True):
                part.copy_(weight.T)
            every.append(columns[problem.order])
        return stacked(every)

    def _offset(self, pulls: list[torch.Tensor | None], weight: torch.Tensor) -> torch.Tensor | None:
        """By how much the float weight that is best on the real inputs is another one, in the solver's order: F^T of
        the difference. None where no weight is moved.
        """
        if self.problems[0].drift is not None and self.drift is not None:
            return gptq.drawn(weight, self.drift, self.drift_rounded)
        given = [pull[problem.order] for pull, problem in zip(pulls, self.problems, strict=True) if pull is not None]
        return gptq.offset_of(stacked(given), self.feedback, self.importance, self.offset_rounded) if given else None

    def _in_natural_order(self, solved: torch.Tensor) -> torch.Tensor:
        natural = torch.empty_like(solved)
        for problem, columns, of in zip(
            self.problems, unstacked(solved, self.problems), unstacked(natural, self.problems), strict=True
        ):
            of[problem.order] = columns
        return natural

    def _refined(
        self,
        goal: torch.Tensor | None,
        solved: torch.Tensor,
        grid: ColumnGrid,
        qparams: list[list[QParams]],
        weights: list[list[torch.Tensor]],
        gradient: torch.Tensor | None,
    ) -> tuple[torch.Tensor, list[list[QParams]]]:
        """All columns visited again in natural order, the scales of each group fitted before."""
        passes, fitted, rounded = self.algorithm.config.refine_passes, None, products.serves(self.feedback)
        with ExitStack() as stack:
            grams = [stack.enter_context(problem.damped()) for problem in self.problems]
            if not can_be_fitted(grid.spec):
                return refine(goal, solved, stacked(grams), grid, passes, gradient=gradient, rounded=rounded), qparams
            fitted = FittedScales(qparams, weights, grid)
            solved = refine(goal, solved, stacked(grams), grid, passes, fitted.size, fitted.fit, gradient, rounded)
        return solved, fitted.fitted()


def _report(name: str, errors: list[float]) -> None:
    """Tell what a layer's output loses: to nearest, and as it was solved."""
    before, after = errors
    report(name, before, after, OUTPUT_ERROR)


def _layer_errors(
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
    params, spec = nearest
    if by_row(spec) and spec.code_spec is None:
        before = fake_quantize(weight[rows].contiguous(), params.rows(rows), spec)
    else:
        before = fake_quantize(weight, params, spec)[rows]
    return gptq.output_error(goal, torch.stack([before, solved[rows]]), problem.group.gram)
