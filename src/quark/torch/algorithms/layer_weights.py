"""The weight of a quantized linear layer, as algorithms read and write it."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from quark.core.array import minmax
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import FakeQuantize, Mode


def weight_quantizer(layer: QuantLayer) -> FakeQuantize:
    """The quantizer of a layer's weight."""
    return cast(FakeQuantize, layer.quantizer("weight"))


def weight_spec(layer: QuantLayer) -> TensorSpec:
    """The spec of a layer's weight."""
    return cast(TensorSpec, layer.spec.weight)


def float_weight(layer: QuantLayer) -> torch.Tensor:
    """The weight of a linear layer, (out, in), float32."""
    return cast(torch.Tensor, layer.weight).detach().float()


def largest_of_columns(layer: QuantLayer) -> torch.Tensor:
    """Largest magnitude of each column of a linear layer's weight, (in,), float32."""
    low, high = minmax(cast(torch.Tensor, layer.weight).detach(), (0,))
    return torch.maximum(-low, high)[0].float()


def store_qparams(layer: QuantLayer, params: QParams) -> None:
    """Keep qparams for a weight that is still float: the algorithms that follow, and calibration, take them."""
    quantizer = weight_quantizer(layer)
    quantizer.store(params)
    quantizer.mode = Mode.off


def freeze_weight(layer: QuantLayer, weight: torch.Tensor, params: QParams) -> None:
    """Write a solved weight, whose values lie on the grid of `params`, into a layer."""
    cast(nn.Parameter, layer.weight).data.copy_(weight)
    quantizer = weight_quantizer(layer)
    quantizer.store(params)
    quantizer.mode = Mode.frozen
