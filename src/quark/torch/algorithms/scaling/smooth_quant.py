"""SmoothQuant: outliers of the activations move into the weights; the formula is in `core/solvers/smooth.py`.

AutoSmoothQuant finds the alpha of each group of layers by its quantized output.

    loss(alpha) = mean over tokens of |Q(x / s) Q(W s)^T - x W^T|,   squared (MSE, RMSE) or not (MAE)

measured on a sample of the inputs, with the quantizers that the layers will have; the static range of a symmetric type
is that of all data.

Where a quantized linear layer makes the input, its rows V_j are divided by s, and under one scale for all of them the
small ones are rounded more coarsely. So that its error counts, too, Q reads in place of x

    x_j (1 + n_j e_j(s)),   e_j(s) = |Q(V_j / s_j) s_j - V_j| / |V_j|

with n = 1 or -1 by chance: the error of the row, relative to what the row makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from quark.core.granularity import PerTensor
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.scales import qparams_from_range
from quark.core.solvers import smooth
from quark.core.solvers.smooth import STEPS, best_candidate
from quark.core.spec import TensorSpec
from quark.errors import ConfigError
from quark.torch.algorithms.base import Block
from quark.torch.algorithms.layer_weights import float_weight, largest_of_columns
from quark.torch.algorithms.scaling.base import Folding, InputStatistics
from quark.torch.algorithms.scaling.fold import Fold
from quark.torch.layers import QuantLayer


class SmoothQuant(Folding):
    """SmoothQuant (Xiao et al. 2022) of every input that can be scaled; see `SmoothQuantConfig`."""

    needs = ("max_abs",)
    validated_apart = True

    def scale(self, fold: Fold, layers: dict[str, QuantLayer], statistics: InputStatistics) -> torch.Tensor | None:
        assert statistics.max_abs is not None
        return smoothed(fold, layers, statistics.max_abs, self.config.alpha, self.config.scale_clamp_min)


def smoothed(
    fold: Fold, layers: dict[str, QuantLayer], act_max: torch.Tensor, alpha: float, floor: float
) -> torch.Tensor:
    """SmoothQuant's scale, one for all channels that the fold ties together."""
    of_layers = [largest_of_columns(layer) for layer in layers.values()]
    weight_max = torch.stack(of_layers).amax(0).to(act_max.device)
    s = smooth.smoothing_scale(fold.shared(act_max), fold.shared(weight_max), alpha, floor)
    return fold.feasible(s)


# AutoSmoothQuant ------------------------------------------------------------------------------------------------------


_LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "MSE": lambda error: error.square().mean(),
    "RMSE": lambda error: error.square().mean().sqrt(),
    "MAE": lambda error: error.abs().mean(),
}
FLOOR = 1e-3
"""Smallest scale, SmoothQuant's default."""


class AutoSmoothQuant(Folding):
    """AutoSmoothQuant; see `AutoSmoothQuantConfig`."""

    needs = ("max_abs", "sample")
    validated_apart = True
    sums = False

    def __init__(self, config: object) -> None:
        super().__init__(config)
        kind = self.config.compute_scale_loss
        if kind not in _LOSSES:
            raise ConfigError(f"compute_scale_loss: {kind!r} is unknown. Possible: {', '.join(_LOSSES)}.")
        self.loss = _LOSSES[kind]

    def enter(self, block: Block) -> None:
        self.block = block.module
        super().enter(block)

    def scale(self, fold: Fold, layers: dict[str, QuantLayer], statistics: InputStatistics) -> torch.Tensor | None:
        act_max, x = statistics.max_abs, statistics.sample
        assert act_max is not None and x is not None

        def candidate(index: int) -> torch.Tensor:
            return smoothed(fold, layers, act_max, index / STEPS, FLOOR)

        chance = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))  # the same in every run
        signs = torch.where(chance < 0.5, -1.0, 1.0).to(x.device)

        def loss(s: torch.Tensor) -> torch.Tensor:
            read = x * (1 + signs * _producer_error(self.block, fold, s))
            errors = []
            for layer in layers.values():
                weight, spec = float_weight(layer), layer.spec.weight
                quantized = weight * s if spec is None else fake_quantize(weight * s, None, spec)
                output = _quantized_input(read / s, layer.spec.input, act_max / s) @ quantized.T
                errors.append(output - x @ weight.T)
            return self.loss(torch.cat(errors, -1))

        return best_candidate(candidate, loss, STEPS + 1, plain=torch.ones_like(act_max))


def _producer_error(block: nn.Module, fold: Fold, s: torch.Tensor) -> torch.Tensor:
    """E of each input channel; 0 where no quantized layer makes it."""
    producer = block.get_submodule(fold.producer)
    if not isinstance(producer, QuantLayer) or producer.spec.weight is None or not isinstance(producer, nn.Linear):
        return torch.zeros_like(s)
    weight = float_weight(producer)
    factor = fold.factor(block, s).to(weight.device).unsqueeze(-1)
    error = fake_quantize(weight / factor, None, producer.spec.weight) * factor - weight
    relative = (error.norm(dim=1) / weight.norm(dim=1).clamp_min(torch.finfo(weight.dtype).tiny)).to(s.device)
    return fold.spread(relative, 0.0)


def _quantized_input(x: torch.Tensor, spec: TensorSpec | None, act_max: torch.Tensor) -> torch.Tensor:
    """The input as the layer's quantizer makes it."""
    if spec is None:
        return x
    if spec.dynamic or spec.is_cast or not isinstance(spec.granularity, PerTensor) or spec.scale_spec is not None:
        return fake_quantize(x.contiguous(), compute_qparams(x, replace(spec, dynamic=True)), spec)
    high = act_max.amax() if spec.symmetric else x.amax()
    return fake_quantize(x.contiguous(), qparams_from_range(x.amin(), high, spec), spec)
