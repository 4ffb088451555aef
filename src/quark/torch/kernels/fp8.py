"""FP8 weights and inputs: torch's `_scaled_mm`, on GPUs that compute it; see `fp8_devices.py`.

y[m, n] = scale_x[m] * scale_w[n] * (sum over k of a[m, k] * q[n, k]),   bfloat16
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quark.core.granularity import PerTensor, PerToken
from quark.torch.kernels.fp8_devices import FACTORS, Fp8Product, codes_of, fp8_product, stored
from quark.torch.kernels.kernel import CodedWeight, Kernel, Multiply, Packed, input_codes
from quark.torch.layers.fake_quant import FakeQuantize

_ON_HOST = Fp8Product(torch.float8_e4m3fn, by_rows=True)
"""The product that the CPU computes, on which tests run."""


class ScaledMm(Kernel):
    """fp8_e4m3 weights per tensor or channel; inputs fp8_e4m3 per tensor or token."""

    name = "scaled_mm"
    takes_codes = True

    def fits(self, weight: CodedWeight) -> bool:
        device = weight.codes.device
        # The CPU has the function too, ten thousand times slower than a float product: it is no kernel there.
        return device.type == "cuda" and self.computes(weight) and fp8_product(device) is not None

    def computes(self, weight: CodedWeight) -> bool:
        """Return True where the formula is the layer's, whatever the device."""
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
        product = fp8_product(weight.codes.device) if weight.codes.is_cuda else _ON_HOST
        assert product is not None
        scale = weight.scale[:, 0] * FACTORS[product.dtype] ** 2  # that of the inputs, which are made anew, stays
        return {"weight": stored(weight.codes, product.dtype), "scale": scale.contiguous(), "by_rows": product.by_rows}

    def codes(self, packed: Packed, shape: tuple[int, int]) -> torch.Tensor:
        return codes_of(packed["weight"])

    def ways(self, input_quantizer: nn.Module | None) -> dict[str, Multiply]:
        assert isinstance(input_quantizer, FakeQuantize)

        def multiply(x: torch.Tensor, packed: Packed) -> torch.Tensor:
            codes, params = input_codes(x, input_quantizer)
            rows = params.scale.float().reshape(-1, 1).expand(x.shape[0], 1).contiguous()
            product = Fp8Product(packed["weight"].dtype, packed["by_rows"])
            return product(stored(codes, product.dtype), packed["weight"], rows, packed["scale"][None])

        return {"fp8": multiply}
