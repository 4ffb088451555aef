"""FP8 weights and inputs: torch's `_scaled_mm`, on GPUs with FP8 units (NVIDIA from 8.9).

y[m, n] = scale_x[m] * scale_w[n] * (sum over k of a[m, k] * q[n, k]),   bfloat16
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quark.core.granularity import PerTensor, PerToken
from quark.torch.kernels.kernel import CodedWeight, Kernel, Multiply, Packed, input_codes
from quark.torch.layers.fake_quant import FakeQuantize

_FIRST_CAPABILITY = (8, 9)
"""The first compute capability with FP8 units."""


class ScaledMm(Kernel):
    """fp8_e4m3 weights per tensor or channel; inputs fp8_e4m3 per tensor or token."""

    name = "scaled_mm"
    takes_codes = True

    def fits(self, weight: CodedWeight) -> bool:
        quantizer, device = weight.input_quantizer, weight.codes.device
        # The CPU has the function too, ten thousand times slower than a float product: it is no kernel there.
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
            return False
        return self.computes(weight) and isinstance(quantizer, FakeQuantize)

    def computes(self, weight: CodedWeight) -> bool:
        """Whether the formula is the layer's, whatever the device."""
        quantizer = weight.input_quantizer
        n, k = weight.shape
        return (
            isinstance(quantizer, FakeQuantize)
            and quantizer.spec.dtype.name == weight.spec.dtype.name == "fp8_e4m3"
            and quantizer.spec.scale_spec is None
            and quantizer.spec.code_spec is None
            and isinstance(quantizer.spec.granularity, (PerTensor, PerToken))
            and weight.scale.shape[1] == 1
            and weight.dtype == torch.bfloat16
            and n % 16 == 0
            and k % 16 == 0
        )

    def pack(self, weight: CodedWeight) -> dict[str, Any]:
        return {"weight": weight.codes.to(torch.float8_e4m3fn), "scale": weight.scale[:, 0].contiguous()}

    def codes(self, packed: Packed, shape: tuple[int, int]) -> torch.Tensor:
        codes: torch.Tensor = packed["weight"].float()
        return codes

    def ways(self, input_quantizer: nn.Module | None) -> dict[str, Multiply]:
        assert isinstance(input_quantizer, FakeQuantize)

        def multiply(x: torch.Tensor, packed: Packed) -> torch.Tensor:
            codes, params = input_codes(x, input_quantizer)
            rows = params.scale.float().reshape(-1, 1).expand(x.shape[0], 1).contiguous()
            a = codes.to(torch.float8_e4m3fn)
            return torch._scaled_mm(a, packed["weight"].t(), rows, packed["scale"][None], out_dtype=torch.bfloat16)

        return {"fp8": multiply}
