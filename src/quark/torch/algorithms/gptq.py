"""GPTQ, GPTAQ and Qronos on the layers of a stop; the algebra is in `core/solvers/gptq.py`.

All layers of a stop read the same input, so they share one Hessian and one factor, and their rows are solved together.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from quark.core.granularity import PerGroup
from quark.core.quantize import elementwise, quantize_elements
from quark.core.scales import QParams
from quark.core.solvers import gptq
from quark.core.solvers.importance import weighted_qparams
from quark.core.spec import TensorSpec
from quark.torch.algorithms.base import Algorithm, Block
from quark.torch.algorithms.weights import bake, chosen_layers, fix_scales
from quark.torch.calibrate import naming
from quark.torch.fake_quant import FakeQuantize
from quark.torch.layers import QuantLayer
from quark.torch.lockstep import Stop


class GPTQ(Algorithm):
    """GPTQ (Frantar et al. 2022) with act-order and static groups; see `GPTQConfig`."""

    solves_weights = True

    def visit(self, stop: Stop, block: Block) -> None:
        layers = chosen_layers(stop, block, self.config.inside_layer_modules)
        if not layers:
            return
        with naming(", ".join(layers)):
            hessian = stop.gram
            order = self._order(hessian, layers)
            hessian = hessian[order][:, order]
            upper, _ = gptq.inverse_factor(hessian, self.damping(hessian))
            importance = torch.empty_like(upper[0])
            importance[order] = upper.diagonal() ** -2.0
            fix_scales(layers, block, importance.float())
            drift = self.drift(stop, order, upper)
            for same in _by_spec(layers):
                self._solve(same, order, upper, drift, stop)

    def damping(self, hessian: torch.Tensor) -> float:
        """Share of the mean of the diagonal."""
        return float(self.config.damp_percent)

    def drift(self, stop: Stop, order: torch.Tensor, upper: torch.Tensor) -> torch.Tensor | None:
        """GPTAQ's matrix P."""
        return None

    def target(self, weight: torch.Tensor, stop: Stop, order: torch.Tensor) -> torch.Tensor:
        """The float weight to be rounded, transposed and in order."""
        return weight

    def _order(self, hessian: torch.Tensor, layers: dict[str, QuantLayer]) -> torch.Tensor:
        if self.config.desc_act:
            return gptq.importance_order(hessian)
        if self.config.group_aware_order:
            sizes = {_dynamic_group(_spec(layer)) for layer in layers.values()}
            return gptq.importance_order(hessian, max(sizes) if max(sizes) > 1 else None)
        return torch.arange(len(hessian), device=hessian.device)

    def _solve(
        self,
        layers: dict[str, QuantLayer],
        order: torch.Tensor,
        upper: torch.Tensor,
        drift: torch.Tensor | None,
        stop: Stop,
    ) -> None:
        weights = [cast(nn.Linear, layer).weight.detach().to(order.device) for layer in layers.values()]
        spec = _spec(next(iter(layers.values())))
        grids: list[Any] = [_params(layer) for layer in layers.values()]
        target = self.target(torch.cat([w.float() for w in weights]).T[order].contiguous(), stop, order)
        group = _dynamic_group(spec)
        if self.config.static_groups or group == 1:
            solved = gptq.solve(target, upper, StaticGrid(grids, weights, spec, order), drift)
        else:
            rounder = DynamicGrid(spec, order, group, weights[0].dtype, upper.diagonal().float() ** -2.0)
            solved = gptq.solve(target, upper, rounder, drift, group)
            grids = rounder.params([len(w) for w in weights])
        if self.config.refine_passes:
            hessian = gptq.damped(stop.gram, self.damping(stop.gram))[order][:, order]
            grid = StaticGrid(grids, weights, spec, order)
            solved = gptq.refine(target, solved, hessian, grid, self.config.refine_passes)
        back = torch.empty_like(solved)
        back[order] = solved
        for layer, weight, params, rows in zip(
            layers.values(), weights, grids, torch.split(back.T, [len(w) for w in weights]), strict=True
        ):
            bake(layer, rows.to(weight.dtype), params)


class GPTAQ(GPTQ):
    """GPTAQ (Li et al. 2025): GPTQ that also makes up for the drift of the inputs; see `GPTAQConfig`."""

    needs_float = True

    def drift(self, stop: Stop, order: torch.Tensor, upper: torch.Tensor) -> torch.Tensor | None:
        # (X - X~) X~^T is the transpose of `cross` minus `gram`.
        drift = (stop.cross.T - stop.gram)[order][:, order]
        return gptq.drift_matrix(drift, upper, self.config.alpha)


class Qronos(GPTQ):
    """Qronos (Zhang et al. 2025): rounds the weight that does best on the real inputs; see `QronosConfig`."""

    needs_float = True

    def damping(self, hessian: torch.Tensor) -> float:
        # alpha counts in the largest eigenvalue; the solver, in the mean of the diagonal.
        largest = float(torch.linalg.matrix_norm(hessian.double(), 2))
        return float(self.config.alpha) * largest / float(hessian.diagonal().mean().clip(1e-30))

    def target(self, weight: torch.Tensor, stop: Stop, order: torch.Tensor) -> torch.Tensor:
        hessian, cross = (m[order][:, order] for m in (stop.gram, stop.cross))
        return gptq.best_target(weight, hessian, cross, self.damping(hessian))


class StaticGrid:
    """Rounds columns on scales that are fixed before."""

    def __init__(
        self, params: list[QParams], weights: list[torch.Tensor], spec: TensorSpec, order: torch.Tensor
    ) -> None:
        self.spec = spec
        parts = [elementwise(p, spec, tuple(w.shape)) for p, w in zip(params, weights, strict=True)]
        self.scale = torch.cat([scale for scale, _ in parts]).T[order].contiguous()
        zeros = [zero for _, zero in parts if zero is not None]
        self.zero = torch.cat(zeros).T[order].contiguous() if zeros else None

    def __call__(self, index: int, work: torch.Tensor) -> torch.Tensor:
        zero = None if self.zero is None else self.zero[index]
        return quantize_elements(work[index], self.scale[index], zero, self.spec)


class DynamicGrid:
    """Rounds columns on scales that are found when a group is reached, from its columns as they are then."""

    def __init__(
        self, spec: TensorSpec, order: torch.Tensor, group: int, dtype: torch.dtype, importance: torch.Tensor
    ) -> None:
        self.spec, self.order, self.group, self.dtype, self.importance = spec, order, group, dtype, importance
        self.found: dict[int, QParams] = {}

    def __call__(self, index: int, work: torch.Tensor) -> torch.Tensor:
        group = int(self.order[index]) // self.group
        if group not in self.found:
            columns = slice(index, index + self.group)
            weight = work[columns].T.to(self.dtype).contiguous()
            self.found[group] = weighted_qparams(weight, self.importance[columns], self.spec)
        params = self.found[group]
        zero = None if params.zero_point is None else params.zero_point[:, 0]
        return quantize_elements(work[index], params.scale[:, 0], zero, self.spec)

    def params(self, rows: list[int]) -> list[QParams]:
        """The scales of the layers, which have so many rows each."""
        found = [self.found[group] for group in sorted(self.found)]
        scales = torch.split(torch.cat([p.scale for p in found], 1), rows)
        if found[0].zero_point is None:
            return [QParams(scale.contiguous()) for scale in scales]
        zeros = torch.split(torch.cat([cast(torch.Tensor, p.zero_point) for p in found], 1), rows)
        return [QParams(s.contiguous(), z.contiguous()) for s, z in zip(scales, zeros, strict=True)]


def _spec(layer: QuantLayer) -> TensorSpec:
    spec = layer.spec.weight
    assert spec is not None
    return spec


def _params(layer: QuantLayer) -> QParams:
    params = cast(FakeQuantize, layer.quantizer("weight")).params
    assert params is not None
    return params


def _dynamic_group(spec: TensorSpec) -> int:
    """The group size along the columns whose scale can be found on the way; 1 where there is none."""
    split = spec.split
    if not isinstance(split, PerGroup) or split.axis not in (-1, 1) or split.pad or spec.scale_spec is not None:
        return 1
    return max(split.size, 1)


def _by_spec(layers: dict[str, QuantLayer]) -> list[dict[str, QuantLayer]]:
    """The layers, those of one spec together."""
    found: dict[TensorSpec, dict[str, QuantLayer]] = {}
    for name, layer in layers.items():
        found.setdefault(_spec(layer), {})[name] = layer
    return list(found.values())
