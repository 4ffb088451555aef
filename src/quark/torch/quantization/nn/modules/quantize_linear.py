"""Address of the quantized linear layer. The code is in quark.torch.layers."""

from quark.torch.layers.linear import QuantLinear as QuantLinear
