"""QuantConvTranspose2d."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from quark.torch.layers.base import QuantLayer


class QuantConvTranspose2d(QuantLayer, nn.ConvTranspose2d):
    """Quantized nn.ConvTranspose2d; weight (in_channels, out_channels / groups, kH, kW)."""

    float_class = nn.ConvTranspose2d

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        x = self.quantized("input", input)
        padding = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, 2, self.dilation  # type: ignore[arg-type]
        )
        weight, bias = self.quantized("weight", self.weight), self.quantized_bias()
        y = F.conv_transpose2d(
            x, weight, bias, self.stride, self.padding, padding, self.groups, self.dilation  # type: ignore[arg-type]
        )
        return self.quantized("output", y)
