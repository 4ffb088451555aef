"""Kernels: quantized linear layers that multiply with their codes. A new one is a file here and a row of `KERNELS`."""

from quark.torch.kernels.accelerate import KERNELS, accelerate
from quark.torch.kernels.native import RuntimeOptions, disable_native_inference, enable_native_inference

__all__ = ["KERNELS", "RuntimeOptions", "accelerate", "disable_native_inference", "enable_native_inference"]
