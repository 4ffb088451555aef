"""QuantLinear: y = Q(x) Q(W)^T + Q(b), plus what a low-rank branch gives where there is one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from quark.torch.layers.base import QuantLayer
from quark.torch.layers.low_rank import with_branch


class QuantLinear(QuantLayer, nn.Linear):
    """Quantized nn.Linear; weight (out_features, in_features)."""

    float_class = nn.Linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self.quantized("input", input)
        y = F.linear(x, self.quantized_weight(), self.quantized_bias())
        return self.quantized("output", with_branch(self, input, y))
