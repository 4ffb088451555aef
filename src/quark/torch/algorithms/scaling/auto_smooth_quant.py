"""AutoSmoothQuant: SmoothQuant with the alpha of each group of layers found by its quantized output.

    loss(alpha) = mean over tokens of |Q(x / s) Q(W s)^T - x W^T|,   squared (MSE, RMSE) or not (MAE)

measured on a sample of the inputs, with the quantizers that the layers will have; the static range of a symmetric type
is that of all data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from quark.core.granularity import PerTensor
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.scales import qparams_from_range
from quark.core.solvers.smooth import STEPS, search
from quark.core.spec import TensorSpec
from quark.errors import ConfigError
from quark.torch.algorithms.layer_weights import float_weight
from quark.torch.algorithms.scaling.base import Folding, InputStatistics
from quark.torch.algorithms.scaling.fold import Fold
from quark.torch.algorithms.scaling.smooth_quant import smoothed
from quark.torch.layers import QuantLayer

LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "MSE": lambda error: error.square().mean(),
    "RMSE": lambda error: error.square().mean().sqrt(),
    "MAE": lambda error: error.abs().mean(),
}
FLOOR = 1e-3
"""Smallest scale, SmoothQuant's default."""


class AutoSmoothQuant(Folding):
    """AutoSmoothQuant; see `AutoSmoothQuantConfig`."""

    needs = ("max_abs", "sample")
    sums = False

    def __init__(self, config: object) -> None:
        super().__init__(config)
        kind = self.config.compute_scale_loss
        if kind not in LOSSES:
            raise ConfigError(f"compute_scale_loss: {kind!r} is unknown. Possible: {', '.join(LOSSES)}.")
        self.loss = LOSSES[kind]

    def scale(self, fold: Fold, layers: dict[str, QuantLayer], statistics: InputStatistics) -> torch.Tensor | None:
        act_max, x = statistics.max_abs, statistics.sample
        assert act_max is not None and x is not None

        def candidate(index: int) -> torch.Tensor:
            return smoothed(fold, layers, act_max, index / STEPS, FLOOR)

        def loss(s: torch.Tensor) -> float:
            errors = [_output_error(layer, x, s, act_max) for layer in layers.values()]
            return float(self.loss(torch.cat(errors, -1)))

        losses: dict[int, float] = {}
        best = search(lambda i: losses.setdefault(i, loss(candidate(i))), STEPS + 1)
        return candidate(best) if losses[best] < loss(torch.ones_like(act_max)) else None


def _output_error(layer: QuantLayer, x: torch.Tensor, s: torch.Tensor, act_max: torch.Tensor) -> torch.Tensor:
    """Q(x / s) Q(W s)^T - x W^T."""
    weight, spec = float_weight(layer), layer.spec.weight
    scaled = weight * s
    quantized = scaled if spec is None else fake_quantize(scaled, None, spec)
    return _quantized_input(x / s, layer.spec.input, act_max / s) @ quantized.T - x @ weight.T


def _quantized_input(x: torch.Tensor, spec: TensorSpec | None, act_max: torch.Tensor) -> torch.Tensor:
    """The input as the layer's quantizer makes it."""
    if spec is None:
        return x
    if spec.dynamic or spec.is_cast or not isinstance(spec.granularity, PerTensor) or spec.scale_spec is not None:
        return fake_quantize(x.contiguous(), compute_qparams(x, replace(spec, dynamic=True)), spec)
    high = act_max.amax() if spec.symmetric else x.amax()
    return fake_quantize(x.contiguous(), qparams_from_range(x.amin(), high, spec), spec)
