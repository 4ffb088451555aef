"""Gradients of fake quantization, for training.

With q = clamp(round(x/s) + z, qmin, qmax) and y = (q - z) s, rounding counts as the identity, and so

    dy/dx = 1 within the range, 0 where x is cut off
    dy/ds = (y - x) / s within the range, y / s where x is cut off

LSQ (learned step size, Esser et al. 2019, arXiv:1902.08153, eq. 2 and 3) learns s. The range is
qmin <= x/s + z <= qmax, and the gradient of s is multiplied by g = 1 / sqrt(N qmax): N is the number of values that
share the step, in a weight, or in one sample (entry of the first axis) of an activation.

TQT (trained quantization thresholds, Jain et al. 2019, arXiv:1903.08066, eq. 6 to 8) learns log2 t:

    s = 2^ceil(log2 t) / 2^(bits - 1)          dy/dlog2 t = s ln 2 dy/ds          (ceil counts as the identity)

Everywhere but in LSQ the range reaches half a step further, as far as rounding leads to the last code. Scales that
follow the live tensor (dynamic, shared exponents) cut nothing off; a cast neither: dy/dx = 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from quark.core.quantize import fake_quantize
from quark.core.scales import EPS, QParams, exp2
from quark.core.spec import Learning, TensorSpec


def learned_value(scale: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the value that is trained in place of `scale`: the scale itself (LSQ), or log2 of the threshold (TQT)."""
    if spec.learning is Learning.lsq:
        return scale.detach().float().clone()
    return torch.log2(scale.detach().float() * ((spec.dtype.max - spec.dtype.min) / 2))


def learned_scale(value: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The scale that a trained value stands for, without gradient. It never falls under the least of core/scales."""
    value = value.detach()
    if spec.learning is Learning.lsq:
        return value.clamp_min(EPS)
    return exp2(torch.ceil(value).to(torch.int32) - (spec.dtype.bits - 1)).clamp_min(EPS)


class TrainableFakeQuantize(torch.autograd.Function):
    """fake_quantize with the gradients of this file.

    Args of `apply`: x; the learned value, None where nothing is learned; scale and zero point; the spec.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, learned: torch.Tensor | None, params: QParams | None, spec: TensorSpec
    ) -> torch.Tensor:
        y: torch.Tensor = fake_quantize(x.contiguous(), params, spec)
        inside = slope = factor = None
        two_levels = spec.scale_spec is not None or spec.code_spec is not None
        if params is not None and not (spec.dynamic or spec.is_cast or spec.is_block or two_levels):
            inside = _within_range(x, params, spec)
            if learned is not None:
                slope = (y.float() - x.float() * inside) / spec.split.to_elements(params.scale, tuple(x.shape))
                factor = _factor(x, params.scale, spec)
        ctx.save_for_backward(inside, slope, factor)
        ctx.split = spec.split
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        inside, slope, factor = ctx.saved_tensors
        of_x = gradient if inside is None else gradient * inside
        if slope is None:
            return of_x, None, None, None
        return of_x, ctx.split.sums(gradient.float() * slope) * factor, None, None


def _within_range(x: torch.Tensor, params: QParams, spec: TensorSpec) -> torch.Tensor:
    """Which values of x are not cut off; bool, the shape of x."""
    split, shape = spec.split, tuple(x.shape)
    margin = 0.0 if spec.dtype.is_float or spec.learning is Learning.lsq else 0.5
    scale = split.to_blocks(params.scale, shape)
    zero = 0.0 if params.zero_point is None else split.to_blocks(params.zero_point, shape)
    if spec.symmetric and spec.dtype.signed:
        zero = 0.0
    blocks = split.blocks(x)
    low, high = (spec.dtype.min - margin - zero) * scale, (spec.dtype.max + margin - zero) * scale
    return split.unblock((blocks >= low) & (blocks <= high), shape)


def _factor(x: torch.Tensor, scale: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The derivative of the scale by the learned value, times LSQ's g; the shape of the scale."""
    if spec.learning is Learning.tqt:
        return scale * math.log(2)
    shared = x.numel() / scale.numel() / (1 if isinstance(x, nn.Parameter) or x.ndim == 0 else x.shape[0])
    return torch.full_like(scale, 1 / math.sqrt(max(1.0, shared * spec.dtype.max)))
