"""QuantConvTranspose2d."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from quark.torch.layers.base import QuantLayer


class QuantConvTranspose2d(QuantLayer, nn.ConvTranspose2d):
    """Quantized nn.ConvTranspose2d; weight (in_channels, out_channels / groups, kH, kW)."""

    float_class = nn.ConvTranspose2d

    def forward(self, input: torch.Tensor, output_size: Any = None) -> torch.Tensor:
        x = self.quantized("input", input)
        # torch types these tuples as lists.
        stride, padding, size, dilation = map(list, (self.stride, self.padding, self.kernel_size, self.dilation))
        extra: Any = self._output_padding(input, output_size, stride, padding, size, 2, dilation)  # type: ignore[arg-type]
        y = F.conv_transpose2d(
            x,
            self.quantized_weight(),
            self.quantized_bias(),
            self.stride,
            padding,  # type: ignore[arg-type]
            extra,
            self.groups,
            self.dilation,
        )
        return self.quantized("output", y)
