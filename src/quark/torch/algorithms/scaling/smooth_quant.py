"""SmoothQuant: outliers of the activations move into the weights; the formula is in `core/solvers/smooth.py`."""

from __future__ import annotations

import torch

from quark.core.solvers import smooth
from quark.torch.algorithms.layer_weights import largest_of_columns
from quark.torch.algorithms.scaling.base import Folding, InputStatistics
from quark.torch.algorithms.scaling.fold import Fold
from quark.torch.layers import QuantLayer


class SmoothQuant(Folding):
    """SmoothQuant (Xiao et al. 2022) of every input that can be scaled; see `SmoothQuantConfig`."""

    needs = ("max_abs",)

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
