"""Kernels: quantized linear layers that multiply with their codes. A new one is a file here and a row of `KERNELS`."""

from quark.torch.kernels.accelerate import KERNELS, accelerate

__all__ = ["KERNELS", "accelerate"]
