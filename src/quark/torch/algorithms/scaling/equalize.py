"""Equalizing: every input channel as large as the weights that read it, for values that share scales in blocks.

    s_i = (E x_i^2 / sum_o W_oi^2)^(1/4)    x_i / s_i and W_i s_i have norms that are proportional

Rounding a block of channels makes an error in each of them that is in proportion to the block's largest value. The
inputs' error reaches the outputs through the weights, that of the weights through the inputs, so both are about

    sum over blocks of (sum in the block of E x_i^2 / s_i^2) (sum in the block of |W_i|^2 s_i^2)

which is least, by Cauchy and Schwarz, for this s, whatever the blocks are. Means of squares stand for the largest
values: a channel that is large for few tokens is given to the weights less than SmoothQuant gives it.
"""

from __future__ import annotations

import torch

from quark.core.solvers import smooth
from quark.torch.algorithms.layer_weights import float_weight
from quark.torch.algorithms.scaling.base import Folding, InputStatistics
from quark.torch.algorithms.scaling.fold import Fold
from quark.torch.layers import QuantLayer


class Equalize(Folding):
    """Equal shares of inputs and weights in every channel that can be scaled; see `EqualizeConfig`."""

    needs = ("mean_square",)

    @property
    def keeps_better(self) -> bool:
        """False: the error of a block after others is mostly theirs, by which the formula would be undone by chance."""
        return False

    def scale(self, fold: Fold, layers: dict[str, QuantLayer], statistics: InputStatistics) -> torch.Tensor | None:
        assert statistics.mean_square is not None
        columns = [float_weight(layer).square().sum(0).to(statistics.mean_square.device) for layer in layers.values()]
        inputs = fold.shared(statistics.mean_square, "mean")
        return fold.feasible(smooth.equalizing_scale(inputs, fold.shared(torch.stack(columns).sum(0), "mean")))
