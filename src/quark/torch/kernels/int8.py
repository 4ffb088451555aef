"""int8 weights, float inputs: torch's `_weight_int8pack_mm`, bfloat16 inputs, float32 sums.

y = (sum over k of x[k] * q[n, k]) * scale[n]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from quark.torch.kernels.kernel import CodedWeight, Kernel, Multiply, Packed

PIECE = 256 * 4096
"""Values of the weight that are converted at once, so that they stay in the cache: measured, 256 rows of 4096."""


class Int8Weights(Kernel):
    """Symmetric int8 weights under a scale per channel or tensor."""

    name = "int8_weights"

    def fits(self, weight: CodedWeight) -> bool:
        return (
            weight.codes.device.type == "cpu"
            and weight.spec.dtype.name == "int8"
            and weight.scale.shape[1] == 1
            and weight.zero is None
            and weight.fits_bfloat16()
        )

    def pack(self, weight: CodedWeight) -> dict[str, Any]:
        return {"weight": weight.codes.to(torch.int8), "scale": weight.scale[:, 0].bfloat16()}

    def codes(self, packed: Packed, shape: tuple[int, int]) -> torch.Tensor:
        codes: torch.Tensor = packed["weight"].float()
        return codes

    def ways(self, input_quantizer: nn.Module | None) -> dict[str, Multiply]:
        return {"packed": _packed, "decoded": _decoded}


def _packed(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    rows = x.bfloat16().contiguous()
    return torch._weight_int8pack_mm(rows, packed["weight"], packed["scale"]).to(x.dtype)


def _decoded(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """For many rows: the weight becomes bfloat16, which holds its codes exactly, some rows at a time."""
    rows, weight, scale = x.bfloat16(), packed["weight"], packed["scale"]
    count, step = weight.shape[0], max(1, PIECE // weight.shape[1])
    if x.dtype != torch.bfloat16:
        scale = scale.float()
    if count <= step:
        return (F.linear(rows, weight.bfloat16()) * scale).to(x.dtype)
    out = torch.empty(x.shape[0], count, dtype=x.dtype, device=x.device)
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        out[:, part] = F.linear(rows, weight[part].bfloat16()) * scale[part]
    return out
