"""Address of the quantized modules. The code is in quark.torch.layers."""
