"""QuantLinear: y = Q(x) Q(W)^T + Q(b)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from quark.torch.layers.base import QuantLayer


class QuantLinear(QuantLayer, nn.Linear):
    """Quantized nn.Linear; weight (out_features, in_features)."""

    float_class = nn.Linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self.quantized("input", input)
        return self.quantized("output", F.linear(x, self.quantized("weight", self.weight), self.quantized_bias()))
