"""QuantConv2d."""

from __future__ import annotations

import torch
from torch import nn

from quark.torch.layers.base import QuantLayer


class QuantConv2d(QuantLayer, nn.Conv2d):
    """Quantized nn.Conv2d; weight (out_channels, in_channels / groups, kH, kW)."""

    float_class = nn.Conv2d

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self.quantized("input", input)
        y = self._conv_forward(x, self.quantized_weight(), self.quantized_bias())
        return self.quantized("output", y)
