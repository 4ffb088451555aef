"""GPTQ, GPTAQ and Qronos on the layers of a stop; the algebra is in `core/solvers/gptq.py`.

All layers of a stop read the same input, so they share one Hessian and one factor, and their rows are solved together.
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
from quark.torch.algorithms.layer_inputs import Stop
from quark.torch.algorithms.rounding.grids import DynamicGrid, StaticGrid, dynamic_group, refitted
from quark.torch.algorithms.rounding.weights import bake, chosen_layers, fix_scales
from quark.torch.calibration.calibrate import naming
from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import FakeQuantize


class GPTQ(Algorithm):
    """GPTQ (Frantar et al. 2022) with act-order and static groups; see `GPTQConfig`."""

    batches_experts = True

    def visit(self, stop: Stop, block: Block) -> None:
        self.visit_experts([stop], block)

    def visit_experts(self, stops: list[Stop], block: Block) -> None:
        sites: dict[Any, list[_Site]] = {}
        for stop in stops:
            if layers := chosen_layers(stop, block, self.config.inside_layer_modules):
                with naming(", ".join(layers)):
                    stop = as_read(stop, layers)
                    site = _Site(stop, layers, self._order(stop.gram, layers))
                sites.setdefault(site.shape, []).append(site)
        for alike in sites.values():
            self._solve(alike, block)

    def _solve(self, sites: list[_Site], block: Block) -> None:
        upper = self._factor(sites)
        with naming(_names(sites)):
            order = _stacked(site.order for site in sites)
            diagonal = upper.diagonal(0, -2, -1) ** -2.0
            importance = torch.empty_like(diagonal).scatter_(-1, order, diagonal).float()
            layers = {name: layer for site in sites for name, layer in site.layers.items()}
            seen = zip(sites, _unstacked(importance, sites), strict=True)
            fix_scales(layers, block, {name: one for site, one in seen for name in site.layers})
            drift = self._drift(sites, upper)
            upper = upper.float()
            for same in zip(*(_by_spec(site.layers) for site in sites), strict=True):
                self._round(sites, same, upper, drift)

    def _factor(self, sites: list[_Site]) -> torch.Tensor:
        """The inverse factors; where those of several experts cannot be had at once, each is damped by itself."""
        hessians = [site.ordered(site.stop.gram) for site in sites]
        damping = [self.damping(hessian) for hessian in hessians]
        if len(sites) == 1:
            with naming(_names(sites)):
                return gptq.inverse_factor(hessians[0], damping[0])[0]
        whole = torch.stack(hessians)
        del hessians
        try:
            return gptq.inverse_factor(whole, damping)[0]
        except CalibrationError:
            return torch.stack([self._factor([site]) for site in sites])

    def _drift(self, sites: list[_Site], upper: torch.Tensor) -> torch.Tensor | None:
        factors = _unstacked(upper, sites)
        drifts = [self.drift(site.stop, site.order, one) for site, one in zip(sites, factors, strict=True)]
        return None if drifts[0] is None else _stacked(cast(list[torch.Tensor], drifts))

    def damping(self, hessian: torch.Tensor) -> float:
        """Share of the mean of the diagonal."""
        return float(self.config.damp_percent)

    def drift(self, stop: Stop, order: torch.Tensor, upper: torch.Tensor) -> torch.Tensor | None:
        """GPTAQ's matrix P."""
        return None

    def target(self, weight: torch.Tensor, stop: Stop, order: torch.Tensor) -> torch.Tensor:
        """The float weight to be rounded, transposed and in order."""
        return weight

    def goal(self, target: torch.Tensor, stop: Stop, order: torch.Tensor) -> torch.Tensor:
        """The float weight that the refinement comes near to, transposed and in order."""
        return target

    def _order(self, hessian: torch.Tensor, layers: dict[str, QuantLayer]) -> torch.Tensor:
        if self.config.desc_act:
            return gptq.importance_order(hessian)
        if self.config.group_aware_order:
            sizes = {dynamic_group(_spec(layer)) for layer in layers.values()}
            return gptq.importance_order(hessian, max(sizes) if max(sizes) > 1 else None)
        return torch.arange(len(hessian), device=hessian.device)

    def _round(
        self,
        sites: list[_Site],
        layers: Sequence[dict[str, QuantLayer]],
        upper: torch.Tensor,
        drift: torch.Tensor | None,
    ) -> None:
        """Solve the layers of one spec of each site."""
        orders, device = [site.order for site in sites], sites[0].order.device
        weights = [[cast(nn.Linear, layer).weight.detach().to(device) for layer in some.values()] for some in layers]
        spec, rows = _spec(next(iter(layers[0].values()))), [len(weight) for weight in weights[0]]
        grids: list[list[Any]] = [[_params(layer) for layer in some.values()] for some in layers]
        targets = [
            self.target(torch.cat([w.float() for w in own]).T[site.order].contiguous(), site.stop, site.order)
            for own, site in zip(weights, sites, strict=True)
        ]
        target, group = _stacked(targets), dynamic_group(spec)
        if self.config.static_groups or group == 1:
            solved = gptq.solve(target, upper, StaticGrid(grids, weights, spec, orders), drift)
        else:
            importance = upper.diagonal(0, -2, -1).float() ** -2.0
            rounder = DynamicGrid(spec, orders, group, weights[0][0].dtype, importance)
            solved = gptq.solve(target, upper, rounder, drift, group)
            grids = rounder.params(rows)
        if self.config.refine_passes:
            hessian = _stacked(site.ordered(self._damped(site.stop.gram)).float() for site in sites)
            goal = _stacked(self.goal(t, site.stop, site.order) for t, site in zip(targets, sites, strict=True))
            for _ in range(self.config.refine_passes):
                grids = refitted(grids, weights, spec, goal, solved, hessian, orders)
                solved = gptq.refine(goal, solved, hessian, StaticGrid(grids, weights, spec, orders), 1)
        for index, one in enumerate(_unstacked(solved, sites)):
            back = torch.empty_like(one)
            back[orders[index]] = one
            for layer, values, params in zip(
                layers[index].values(), torch.split(back.T, rows), grids[index], strict=True
            ):
                bake(layer, values.to(weights[index][0].dtype), params)

    def _damped(self, hessian: torch.Tensor) -> torch.Tensor:
        return gptq.damped(hessian, self.damping(hessian))


class GPTAQ(GPTQ):
    """GPTAQ (Li et al. 2025): GPTQ that also makes up for the drift of the inputs; see `GPTAQConfig`."""

    needs_float = True

    def drift(self, stop: Stop, order: torch.Tensor, upper: torch.Tensor) -> torch.Tensor | None:
        # (X - X~) X~^T is the transpose of `cross` minus `gram`.
        drift = (stop.cross.T - stop.gram)[order][:, order]
        return gptq.drift_matrix(drift, upper, self.config.alpha)

    def goal(self, target: torch.Tensor, stop: Stop, order: torch.Tensor) -> torch.Tensor:
        cross = torch.lerp(stop.gram, stop.cross, self.config.alpha)
        return gptq.best_target(target, stop.gram[order][:, order], cross[order][:, order], self.config.damp_percent)


class Qronos(GPTQ):
    """Qronos (Zhang et al. 2025): rounds the weight that does best on the real inputs; see `QronosConfig`."""

    needs_float = True

    def damping(self, hessian: torch.Tensor) -> float:
        # alpha counts in the largest eigenvalue; the solver, in the mean of the diagonal.
        largest = gptq.largest_eigenvalue(hessian)
        return float(self.config.alpha) * largest / float(hessian.diagonal().mean().clip(1e-30))

    def target(self, weight: torch.Tensor, stop: Stop, order: torch.Tensor) -> torch.Tensor:
        hessian, cross = (m[order][:, order] for m in (stop.gram, stop.cross))
        return gptq.best_target(weight, hessian, cross, self.damping(hessian))


def as_read(stop: Stop, layers: dict[str, QuantLayer]) -> Stop:
    """The stop with its inputs quantized as the layers will quantize them, where that follows from each input alone.

    The layers then make up for the error of their activations, too, as far as weights can.
    """
    specs = {layer.spec.input for layer in layers.values()}
    spec = next(iter(specs))
    if len(specs) > 1 or spec is None or not spec.dynamic or spec.scale_spec is not None:
        return stop
    inputs = [fake_quantize(x.contiguous(), None, spec) if x.numel() else x for x in stop.inputs]
    return Stop(stop.layers, inputs, stop.float_inputs)


@dataclass
class _Site:
    """Layers that read one tensor, with the order in which their columns are visited."""

    stop: Stop
    layers: dict[str, QuantLayer]
    order: torch.Tensor

    def ordered(self, matrix: torch.Tensor) -> torch.Tensor:
        """Rows and columns in the order of the solver."""
        return matrix[self.order][:, self.order]

    @property
    def shape(self) -> tuple[Any, ...]:
        """What sites have in common that are solved at once."""
        weights = [cast(nn.Linear, layer).weight for layer in self.layers.values()]
        return tuple((_spec(layer), w.shape, w.dtype) for layer, w in zip(self.layers.values(), weights, strict=True))


def _names(sites: list[_Site]) -> str:
    """The first layers, and how many more."""
    first = ", ".join(sites[0].layers)
    return first if len(sites) == 1 else f"{first} and those of {len(sites) - 1} more experts"


def _stacked(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """One tensor for all experts; the tensor itself where there is one."""
    parts = list(parts)
    return parts[0] if len(parts) == 1 else torch.stack(parts)


def _unstacked(whole: torch.Tensor, sites: list[_Site]) -> list[torch.Tensor]:
    return [whole] if len(sites) == 1 else list(whole)


def _spec(layer: QuantLayer) -> TensorSpec:
    spec = layer.spec.weight
    assert spec is not None
    return spec


def _params(layer: QuantLayer) -> QParams:
    params = cast(FakeQuantize, layer.quantizer("weight")).params
    assert params is not None
    return params


def _by_spec(layers: dict[str, QuantLayer]) -> list[dict[str, QuantLayer]]:
    """The layers, those of one spec together."""
    found: dict[TensorSpec, dict[str, QuantLayer]] = {}
    for name, layer in layers.items():
        found.setdefault(_spec(layer), {})[name] = layer
    return list(found.values())
