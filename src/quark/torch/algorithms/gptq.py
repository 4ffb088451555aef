"""GPTQ, GPTAQ and Qronos on the layers of a stop; the algebra is in `core/solvers/gptq.py`.

All layers of a stop read the same input, so they share one Hessian and one factor, and their rows are solved together.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from quark.core.quantize import fake_quantize
from quark.core.scales import QParams
from quark.core.solvers import gptq
from quark.core.spec import TensorSpec
from quark.torch.algorithms.base import Algorithm, Block
from quark.torch.algorithms.grids import DynamicGrid, StaticGrid, dynamic_group, refitted
from quark.torch.algorithms.weights import bake, chosen_layers, fix_scales
from quark.torch.calibrate import naming
from quark.torch.fake_quant import FakeQuantize
from quark.torch.layers import QuantLayer
from quark.torch.lockstep import Stop


class GPTQ(Algorithm):
    """GPTQ (Frantar et al. 2022) with act-order and static groups; see `GPTQConfig`."""

    def visit(self, stop: Stop, block: Block) -> None:
        layers = chosen_layers(stop, block, self.config.inside_layer_modules)
        if not layers:
            return
        stop = as_read(stop, layers)
        with naming(", ".join(layers)):
            hessian = stop.gram
            order = self._order(hessian, layers)
            hessian = hessian[order][:, order]
            upper, _ = gptq.inverse_factor(hessian, self.damping(hessian))
            importance = torch.empty_like(upper[0])
            importance[order] = upper.diagonal() ** -2.0
            fix_scales(layers, block, importance.float())
            drift = self.drift(stop, order, upper)
            upper = upper.float()
            del hessian
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
        group = dynamic_group(spec)
        if self.config.static_groups or group == 1:
            solved = gptq.solve(target, upper, StaticGrid(grids, weights, spec, order), drift)
        else:
            rounder = DynamicGrid(spec, order, group, weights[0].dtype, upper.diagonal().float() ** -2.0)
            solved = gptq.solve(target, upper, rounder, drift, group)
            grids = rounder.params([len(w) for w in weights])
        if self.config.refine_passes:
            hessian = gptq.damped(stop.gram, self.damping(stop.gram))[order][:, order].float()
            goal = self.goal(target, stop, order)
            for _ in range(self.config.refine_passes):
                grids = refitted(grids, weights, spec, goal, solved, hessian, order)
                grid = StaticGrid(grids, weights, spec, order)
                solved = gptq.refine(goal, solved, hessian, grid, 1)
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
