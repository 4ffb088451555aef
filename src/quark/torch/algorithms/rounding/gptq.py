"""GPTQ, GPTAQ and Qronos on layers that read one tensor; the algebra is in `core/solvers/gptq.py`.

Such layers share one Hessian and one factor, and their rows are solved together.
Experts of one shape are solved at once: arrays have an axis for the expert in front where there are several.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from quark.core.quantize import fake_quantize
from quark.core.scales import QParams
from quark.core.solvers import gptq
from quark.core.spec import TensorSpec
from quark.errors import CalibrationError
from quark.torch.algorithms.base import Algorithm, Block
from quark.torch.algorithms.input_group import InputGroup
from quark.torch.algorithms.layer_weights import freeze_weight, weight_quantizer, weight_spec
from quark.torch.algorithms.rounding.fix_scales import chosen_layers, fix_scales
from quark.torch.algorithms.rounding.grids import DynamicGrid, StaticGrid, dynamic_group, refitted
from quark.torch.calibration.calibrate import naming
from quark.torch.layers import QuantLayer


class GPTQ(Algorithm):
    """GPTQ (Frantar et al. 2022) with act-order and static groups; see `GPTQConfig`."""

    batches_experts = True

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
        upper = self._factor(problems)
        with naming(_names(problems)):
            order = _stacked(problem.order for problem in problems)
            diagonal = upper.diagonal(0, -2, -1) ** -2.0
            importance = torch.empty_like(diagonal).scatter_(-1, order, diagonal).float()
            layers = {name: layer for problem in problems for name, layer in problem.layers.items()}
            of_layers: dict[str, torch.Tensor] = {}
            for problem, of_columns in zip(problems, _unstacked(importance, problems), strict=True):
                of_layers |= dict.fromkeys(problem.layers, of_columns)
            fix_scales(layers, block, of_layers)
            drift = self._drift(problems, upper)
            upper = upper.float()
            for same in zip(*(_by_spec(problem.layers) for problem in problems), strict=True):
                self._round(problems, same, upper, drift)

    def _factor(self, problems: list[_Problem]) -> torch.Tensor:
        """The inverse factors; where those of several experts cannot be had at once, each is damped by itself."""
        hessians = [problem.ordered(problem.group.gram) for problem in problems]
        damping = [self.damping(hessian) for hessian in hessians]
        if len(problems) == 1:
            with naming(_names(problems)):
                return gptq.inverse_factor(hessians[0], damping[0])[0]
        whole = torch.stack(hessians)
        del hessians
        try:
            return gptq.inverse_factor(whole, damping)[0]
        except CalibrationError:
            return torch.stack([self._factor([problem]) for problem in problems])

    def _drift(self, problems: list[_Problem], upper: torch.Tensor) -> torch.Tensor | None:
        factors = _unstacked(upper, problems)
        drifts = [self.drift(p.group, p.order, factor) for p, factor in zip(problems, factors, strict=True)]
        return None if drifts[0] is None else _stacked(cast(list[torch.Tensor], drifts))

    def damping(self, hessian: torch.Tensor) -> float:
        """Share of the mean of the diagonal."""
        return float(self.config.damp_percent)

    def drift(self, group: InputGroup, order: torch.Tensor, upper: torch.Tensor) -> torch.Tensor | None:
        """GPTAQ's matrix P."""
        return None

    def target(self, weight: torch.Tensor, group: InputGroup, order: torch.Tensor) -> torch.Tensor:
        """The float weight to be rounded, transposed and in order."""
        return weight

    def goal(self, target: torch.Tensor, group: InputGroup, order: torch.Tensor) -> torch.Tensor:
        """The float weight that the refinement comes near to, transposed and in order."""
        return target

    def _order(self, hessian: torch.Tensor, layers: dict[str, QuantLayer]) -> torch.Tensor:
        if self.config.desc_act:
            return gptq.importance_order(hessian)
        if self.config.group_aware_order:
            sizes = {dynamic_group(weight_spec(layer)) for layer in layers.values()}
            return gptq.importance_order(hessian, max(sizes) if max(sizes) > 1 else None)
        return torch.arange(len(hessian), device=hessian.device)

    def _round(
        self,
        problems: list[_Problem],
        layers: Sequence[dict[str, QuantLayer]],
        upper: torch.Tensor,
        drift: torch.Tensor | None,
    ) -> None:
        """Solve the layers of one spec of each problem."""
        orders, device = [problem.order for problem in problems], problems[0].order.device
        weights = [[cast(nn.Linear, layer).weight.detach().to(device) for layer in own.values()] for own in layers]
        spec, rows = weight_spec(next(iter(layers[0].values()))), [len(weight) for weight in weights[0]]
        qparams: list[list[QParams]] = [[_qparams(layer) for layer in own.values()] for own in layers]
        targets = []
        for problem, own in zip(problems, weights, strict=True):
            columns = torch.cat([weight.float() for weight in own]).T[problem.order].contiguous()
            targets.append(self.target(columns, problem.group, problem.order))
        target, group_size = _stacked(targets), dynamic_group(spec)
        if self.config.static_groups or group_size == 1:
            solved = gptq.solve(target, upper, StaticGrid(qparams, weights, spec, orders), drift)
        else:
            importance = upper.diagonal(0, -2, -1).float() ** -2.0
            grid = DynamicGrid(spec, orders, group_size, weights[0][0].dtype, importance)
            solved = gptq.solve(target, upper, grid, drift, group_size)
            qparams = grid.params(rows)
        if self.config.refine_passes:
            hessian = _stacked(problem.ordered(self._damped(problem.group.gram)).float() for problem in problems)
            goal = _stacked(self.goal(t, p.group, p.order) for t, p in zip(targets, problems, strict=True))
            for _ in range(self.config.refine_passes):
                qparams = refitted(qparams, weights, spec, goal, solved, hessian, orders)
                solved = gptq.refine(goal, solved, hessian, StaticGrid(qparams, weights, spec, orders), 1)
        for index, columns in enumerate(_unstacked(solved, problems)):
            natural = torch.empty_like(columns)
            natural[orders[index]] = columns
            parts = torch.split(natural.T, rows)
            for layer, values, params in zip(layers[index].values(), parts, qparams[index], strict=True):
                freeze_weight(layer, values.to(weights[index][0].dtype), params)

    def _damped(self, hessian: torch.Tensor) -> torch.Tensor:
        return gptq.damped(hessian, self.damping(hessian))


class GPTAQ(GPTQ):
    """GPTAQ (Li et al. 2025): GPTQ that also makes up for the drift of the inputs; see `GPTAQConfig`."""

    needs_float = True

    def drift(self, group: InputGroup, order: torch.Tensor, upper: torch.Tensor) -> torch.Tensor | None:
        # (X - X~) X~^T is the transpose of `cross` minus `gram`.
        drift = (group.cross.T - group.gram)[order][:, order]
        return gptq.drift_matrix(drift, upper, self.config.alpha)

    def goal(self, target: torch.Tensor, group: InputGroup, order: torch.Tensor) -> torch.Tensor:
        cross = torch.lerp(group.gram, group.cross, self.config.alpha)
        return gptq.best_target(target, group.gram[order][:, order], cross[order][:, order], self.config.damp_percent)


class Qronos(GPTQ):
    """Qronos (Zhang et al. 2025): rounds the weight that does best on the real inputs; see `QronosConfig`."""

    needs_float = True

    def damping(self, hessian: torch.Tensor) -> float:
        # alpha counts in the largest eigenvalue; the solver, in the mean of the diagonal.
        largest = gptq.largest_eigenvalue(hessian)
        return float(self.config.alpha) * largest / float(hessian.diagonal().mean().clip(1e-30))

    def target(self, weight: torch.Tensor, group: InputGroup, order: torch.Tensor) -> torch.Tensor:
        hessian, cross = (m[order][:, order] for m in (group.gram, group.cross))
        return gptq.best_target(weight, hessian, cross, self.damping(hessian))


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
    """What is solved at once: layers that read one tensor, with the order in which their columns are visited."""

    group: InputGroup
    layers: dict[str, QuantLayer]
    order: torch.Tensor

    def ordered(self, matrix: torch.Tensor) -> torch.Tensor:
        """Rows and columns in the order of the solver."""
        return matrix[self.order][:, self.order]

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
