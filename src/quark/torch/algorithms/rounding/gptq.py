"""GPTQ, GPTAQ and Qronos on layers that read one tensor; the algebra is in `core/solvers/gptq.py`.

Such layers share one Hessian and one factor, and their rows are solved together.
Experts of one shape are solved at once: arrays have an axis for the expert in front where there are several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import nn

from quark.core.quantize import fake_quantize
from quark.core.scales import QParams
from quark.core.solvers import gptq
from quark.core.solvers.columns import ColumnGrid
from quark.core.solvers.refine import refine
from quark.core.spec import TensorSpec
from quark.errors import CalibrationError
from quark.torch.algorithms.base import Algorithm, Block
from quark.torch.algorithms.input_group import InputGroup
from quark.torch.algorithms.layer_weights import freeze_weight, weight_quantizer, weight_spec
from quark.torch.algorithms.rounding.fix_scales import chosen_layers, fix_scales
from quark.torch.algorithms.rounding.grids import (
    DynamicGrid,
    FittedScales,
    by_row,
    can_be_fitted,
    dynamic_group,
    static_grid,
)
from quark.torch.calibration.calibrate import naming
from quark.torch.layers import QuantLayer

ELEMENTS, LEAST_ROWS = 1 << 23, 256
"""Elements of the weights that are solved at once, and rows, of which there are at least so many."""


class GPTQ(Algorithm):
    """GPTQ (Frantar et al. 2022) with act-order and static groups; see `GPTQConfig`."""

    batches_experts = True
    rounds_moved: ClassVar[bool] = True
    """Whether the float weight that `pull` moves is the one that is rounded, or only what refinement comes near to."""

    def on_inputs(self, group: InputGroup, block: Block) -> None:
        self.on_expert_inputs([group], block)

    def on_expert_inputs(self, groups: list[InputGroup], block: Block) -> None:
        problems: dict[Any, list[_Problem]] = {}
        for group in groups:
            layers = chosen_layers(group, block, self.config.inside_layer_modules)
            if not layers:
                continue
            with naming(", ".join(layers)):
                group = as_read(group, layers)
                problem = _Problem(group, layers, self._order(group.gram, layers))
            problems.setdefault(problem.shape, []).append(problem)
        for alike in problems.values():
            self._solve(alike, block)

    def _solve(self, problems: list[_Problem], block: Block) -> None:
        feedback, of_order = self._factor(problems)
        with naming(_names(problems)):
            order = _stacked(problem.order for problem in problems)
            importance = torch.empty_like(of_order).scatter_(-1, order, of_order).float()
            layers = {name: layer for problem in problems for name, layer in problem.layers.items()}
            of_layers: dict[str, torch.Tensor] = {}
            for problem, of_columns in zip(problems, _unstacked(importance, problems), strict=True):
                of_layers |= dict.fromkeys(problem.layers, of_columns)
            fix_scales(layers, block, of_layers)
            solver = _Solver(self, problems, feedback, of_order, self._drift(problems, feedback, of_order))
            for same in zip(*(_by_spec(problem.layers) for problem in problems), strict=True):
                solver.round(same)

    def _factor(self, problems: list[_Problem]) -> tuple[torch.Tensor, torch.Tensor]:
        """F and d; where those of several experts cannot be had at once, each is damped by itself."""
        for problem in problems:
            problem.damping = self.damping(problem.group.gram)
        if len(problems) == 1:
            only = problems[0]
            with naming(_names(problems)):
                feedback, importance, taken = gptq.factor(only.ordered(only.group.gram), only.damping)
            only.damping = cast(float, taken)
            return feedback, importance
        whole = torch.stack([problem.ordered(problem.group.gram) for problem in problems])
        try:
            return gptq.factor(whole, [problem.damping for problem in problems])[:2]
        except CalibrationError:
            alone = [self._factor([problem]) for problem in problems]
            # One may have needed float64.
            feedback, importance = zip(*alone, strict=True)
            return torch.stack([f.double() for f in feedback]), torch.stack([d.double() for d in importance])

    def _drift(self, problems: list[_Problem], feedback: torch.Tensor, importance: torch.Tensor) -> torch.Tensor | None:
        each = zip(problems, _unstacked(feedback, problems), _unstacked(importance, problems), strict=True)
        drifts = [self.drift(p.group, p.order, f, d) for p, f, d in each]
        return None if drifts[0] is None else _stacked(cast(list[torch.Tensor], drifts))

    def damping(self, hessian: torch.Tensor) -> float:
        """Share of the mean of the diagonal."""
        return float(self.config.damp_percent)

    def drift(
        self, group: InputGroup, order: torch.Tensor, feedback: torch.Tensor, importance: torch.Tensor
    ) -> torch.Tensor | None:
        """GPTAQ's matrix P."""
        return None

    def pull(self, weight: torch.Tensor, group: InputGroup) -> torch.Tensor | None:
        """(X~ X^T - H) W, what draws the float weight to the one that does best on the real inputs; None: it stays."""
        return None

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

    def drift(
        self, group: InputGroup, order: torch.Tensor, feedback: torch.Tensor, importance: torch.Tensor
    ) -> torch.Tensor | None:
        # (X - X~) X~^T is the transpose of `cross` minus `gram`.
        drift = (group.cross.T - group.gram)[order[:, None], order]
        return gptq.drift_matrix(drift, feedback, importance, self.config.alpha)

    def pull(self, weight: torch.Tensor, group: InputGroup) -> torch.Tensor | None:
        return self.config.alpha * _moved(weight, group)


class Qronos(GPTQ):
    """Qronos (Zhang et al. 2025): rounds the weight that does best on the real inputs; see `QronosConfig`."""

    needs_float = True

    def damping(self, hessian: torch.Tensor) -> float:
        # alpha counts in the largest eigenvalue; the solver, in the mean of the diagonal.
        largest = gptq.largest_eigenvalue(hessian)
        return float(self.config.alpha) * largest / float(hessian.diagonal().mean().clip(1e-30))

    def pull(self, weight: torch.Tensor, group: InputGroup) -> torch.Tensor | None:
        return _moved(weight, group)


def _moved(weight: torch.Tensor, group: InputGroup) -> torch.Tensor:
    """(X~ X^T - H) W of W transposed, (columns, rows): no matrix of the difference is made."""
    return torch.addmm(group.cross @ weight, group.gram, weight, alpha=-1)


@dataclass
class _Solver:
    """Rounds the layers of some problems, some rows at a time: rows are independent, and this bounds the memory.

    Attributes:
        algorithm: With its settings.
        problems: Experts of one shape, or one problem.
        feedback, importance, drift: Of all problems, in the solver's order.
    """

    algorithm: GPTQ
    problems: list[_Problem]
    feedback: torch.Tensor
    importance: torch.Tensor
    drift: torch.Tensor | None

    def round(self, layers: Sequence[dict[str, QuantLayer]]) -> None:
        """Solve the layers of one spec of each problem."""
        own = [list(of_problem.values()) for of_problem in layers]
        spec, device = weight_spec(own[0][0]), self.feedback.device
        weights = [[cast(nn.Linear, layer).weight.detach().to(device) for layer in some] for some in own]
        qparams = [[_qparams(layer) for layer in some] for some in own]
        solved = [[torch.empty_like(weight) for weight in some] for some in weights]
        found: list[list[list[QParams]]] = [[[] for _ in some] for some in own]
        for pieces in self._pieces([len(weight) for weight in weights[0]], spec):
            some_weights = [[of[layer][rows] for layer, rows in pieces] for of in weights]
            some_params = [[_rows_of(of[layer], rows) for layer, rows in pieces] for of in qparams]
            columns, params = self._solve_rows(some_weights, some_params, spec)
            sizes = [len(weight) for weight in some_weights[0]]
            for problem, of_problem in enumerate(_unstacked(columns, self.problems)):
                for (layer, rows), values, one in zip(
                    pieces, torch.split(of_problem, sizes, 1), params[problem], strict=True
                ):
                    solved[problem][layer][rows] = values.T
                    found[problem][layer].append(one)
        for some, values_of, parts_of in zip(own, solved, found, strict=True):
            for module, weight, parts in zip(some, values_of, parts_of, strict=True):
                freeze_weight(module, weight, _joined(parts))

    def _pieces(self, rows: list[int], spec: TensorSpec) -> list[list[tuple[int, slice]]]:
        """(layer, rows) that are solved at once."""
        if not by_row(spec) or spec.scale_spec is not None:
            return [[(layer, slice(0, count)) for layer, count in enumerate(rows)]]
        most = max(LEAST_ROWS, ELEMENTS // self.importance.numel())
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
        self, weights: list[list[torch.Tensor]], qparams: list[list[QParams]], spec: TensorSpec
    ) -> tuple[torch.Tensor, list[list[QParams]]]:
        """The values of some rows in natural order, transposed, and their scales."""
        config, orders = self.algorithm.config, [problem.order for problem in self.problems]
        columns = [_transposed(own) for own in weights]
        goal, target = self._targets(columns)
        group_size, feedback = dynamic_group(spec), self.feedback.float()
        # What refinement starts from follows from it where the weight that is rounded is the one it comes near to.
        known = config.refine_passes > 0 and self.drift is None and self.algorithm.rounds_moved
        residual = torch.empty_like(target) if known else None
        if config.static_groups or group_size == 1:
            grid: Any = static_grid(qparams, weights, spec, orders)
            solved = gptq.solve(target, feedback, grid, self.drift, residual=residual)
        else:
            grid = DynamicGrid(spec, orders, group_size, weights[0][0].dtype, self.importance.float())
            solved = gptq.solve(target, feedback, grid, self.drift, group_size, residual)
            qparams = grid.params([len(weight) for weight in weights[0]])
        del target, grid
        natural, gradient = self._in_natural_order(solved), None
        del solved
        if residual is not None:
            gradient = self._in_natural_order(gptq.gradient_of(residual, feedback, self.importance.float()))
            del residual
        if config.refine_passes:
            grid = static_grid(qparams, weights, spec)
            natural, qparams = self._refined(goal, natural, grid, qparams, weights, gradient)
        return natural, qparams

    def _targets(self, columns: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The float weight that the refinement comes near to, and, in the solver's order, the one that is rounded."""
        goals, targets = [], []
        each = (_unstacked(x, self.problems) for x in (self.feedback, self.importance))
        for problem, weight, feedback, importance in zip(self.problems, columns, *each, strict=True):
            ordered, pull = weight[problem.order], self.algorithm.pull(weight, problem.group)
            goal = weight
            if pull is not None:
                moved = ordered + gptq.moved_target(pull[problem.order], feedback, importance)
                goal = torch.empty_like(moved)
                goal[problem.order] = moved
                ordered = moved if self.algorithm.rounds_moved else ordered
            goals.append(goal)
            targets.append(ordered)
        return _stacked(goals), _stacked(targets)

    def _in_natural_order(self, solved: torch.Tensor) -> torch.Tensor:
        natural = torch.empty_like(solved)
        for problem, columns, of in zip(
            self.problems, _unstacked(solved, self.problems), _unstacked(natural, self.problems), strict=True
        ):
            of[problem.order] = columns
        return natural

    def _refined(
        self,
        goal: torch.Tensor,
        solved: torch.Tensor,
        grid: ColumnGrid,
        qparams: list[list[QParams]],
        weights: list[list[torch.Tensor]],
        gradient: torch.Tensor | None,
    ) -> tuple[torch.Tensor, list[list[QParams]]]:
        """All columns visited again in natural order, the scales of each group fitted before."""
        passes, fitted = self.algorithm.config.refine_passes, None
        with ExitStack() as damped:
            grams = [damped.enter_context(_damped(problem.group.gram, problem.damping)) for problem in self.problems]
            if not can_be_fitted(grid.spec):
                return refine(goal, solved, _stacked(grams), grid, passes, gradient=gradient), qparams
            fitted = FittedScales(qparams, weights, grid)
            solved = refine(goal, solved, _stacked(grams), grid, passes, fitted.size, fitted.fit, gradient)
        return solved, fitted.fitted()


@contextmanager
def _damped(gram: torch.Tensor, damping: float) -> Iterator[torch.Tensor]:
    """Within: the second moments with the damping on their diagonal; a copy would be a matrix more."""
    diagonal = gram.diagonal()
    before = diagonal.clone()
    diagonal.copy_(torch.where(before == 0, 1.0, before + damping * before.mean()))
    try:
        yield gram
    finally:
        diagonal.copy_(before)


def _transposed(weights: list[torch.Tensor]) -> torch.Tensor:
    """The columns of some weights side by side, (columns, rows of all), float32."""
    columns = weights[0].new_empty((weights[0].shape[1], sum(map(len, weights))), dtype=torch.float32)
    for part, weight in zip(torch.split(columns, [len(weight) for weight in weights], 1), weights, strict=True):
        part.copy_(weight.T)
    return columns


def _rows_of(params: QParams, rows: slice) -> QParams:
    """The scales of some rows; those of a whole tensor serve all."""
    if params.scale.ndim == 0 or (rows.start == 0 and rows.stop >= len(params.scale)):
        return params
    zero = params.zero_point
    return QParams(params.scale[rows], None if zero is None else zero[rows], params.second)


def _joined(parts: list[QParams]) -> QParams:
    """The scales of rows that were solved one part after the other."""
    if len(parts) == 1:
        return parts[0]
    zeros = [part.zero_point for part in parts if part.zero_point is not None]
    return QParams(torch.cat([part.scale for part in parts]), torch.cat(zeros) if zeros else None, parts[0].second)


def as_read(group: InputGroup, layers: dict[str, QuantLayer]) -> InputGroup:
    """The group with its inputs quantized as the layers will quantize them, where that follows from each input alone.

    The layers then make up for the error of their activations, too, as far as weights can.
    """
    specs = {layer.spec.input for layer in layers.values()}
    spec = next(iter(specs))
    if len(specs) > 1 or spec is None or not spec.dynamic or spec.scale_spec is not None:
        return group
    inputs = [fake_quantize(x.contiguous(), None, spec) if x.numel() else x for x in group.inputs]
    return InputGroup(group.layers, inputs, group.float_inputs)


@dataclass
class _Problem:
    """What is solved at once: layers that read one tensor, with the order in which their columns are visited.

    `damping` is the share of the mean of the diagonal that the factor took.
    """

    group: InputGroup
    layers: dict[str, QuantLayer]
    order: torch.Tensor
    damping: float = 0.0

    def ordered(self, matrix: torch.Tensor) -> torch.Tensor:
        """Rows and columns in the order of the solver."""
        return matrix[self.order[:, None], self.order]

    @property
    def shape(self) -> tuple[Any, ...]:
        """What problems have in common that are stacked: spec, shape and dtype of each weight."""
        weights = [cast(nn.Linear, layer).weight for layer in self.layers.values()]
        return tuple(
            (weight_spec(layer), w.shape, w.dtype) for layer, w in zip(self.layers.values(), weights, strict=True)
        )


def _names(problems: list[_Problem]) -> str:
    """The first layers, and how many more."""
    first = ", ".join(problems[0].layers)
    return first if len(problems) == 1 else f"{first} and those of {len(problems) - 1} more experts"


def _stacked(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """One tensor for all experts; the tensor itself where there is one."""
    parts = list(parts)
    return parts[0] if len(parts) == 1 else torch.stack(parts)


def _unstacked(whole: torch.Tensor, problems: list[_Problem]) -> list[torch.Tensor]:
    return [whole] if len(problems) == 1 else list(whole)


def _qparams(layer: QuantLayer) -> QParams:
    return cast(QParams, weight_quantizer(layer).params)


def _by_spec(layers: dict[str, QuantLayer]) -> list[dict[str, QuantLayer]]:
    """The layers, those of one spec together."""
    by_spec: dict[TensorSpec, dict[str, QuantLayer]] = {}
    for name, layer in layers.items():
        by_spec.setdefault(weight_spec(layer), {})[name] = layer
    return list(by_spec.values())
