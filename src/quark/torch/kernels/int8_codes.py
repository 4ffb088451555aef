"""int8_codes: the codes of a layer's input, made in one compiled pass or two instead of nine of torch.

    code = clamp(round(x * (1 / scale)) + zero_point, qmin, qmax) - shift,    shift = 128 for unsigned codes, else 0

The scale is what `quark.core` makes of the range, and the codes are those of `quark.core.quantize`. Where this machine
has no compiler, and for roundings and dtypes that are rare, `quark.core` makes them. What the quantizer of a layer asks
for is looked at once, when its coder is made: a product of one token takes less time than that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quark.core.granularity import PerTensor
from quark.core.kernels.runs import codes as run_codes
from quark.core.kernels.runs import has_live_codes, is_compiled, live_codes, ranges, rule_of
from quark.core.rounding import RoundType
from quark.core.scales import QParams, qparams_from_range
from quark.core.spec import TensorSpec
from quark.torch.kernels.kernel import input_codes
from quark.torch.layers.fake_quant import FakeQuantize

Coder = Callable[[torch.Tensor], tuple[torch.Tensor, QParams]]
"""x (rows, in_features) -> int8 codes of the shape of x, unsigned ones moved by -128; scale and zero point, not moved.

A range that was NaN gives codes that mean nothing, and a scale that is NaN."""


def int8_codes(quantizer: FakeQuantize) -> Coder:
    """What makes the codes of the rows of x under a scale per row or tensor.

    Args:
        quantizer: Of int8 or uint8, one level of scales.
    """
    spec = quantizer.spec
    shift = 0.0 if spec.dtype.signed else 128.0

    def by_torch(x: torch.Tensor) -> tuple[torch.Tensor, QParams]:
        codes, params = input_codes(x, quantizer)
        return (codes - shift if shift else codes).to(torch.int8), params

    if spec.rounding is not RoundType.half_even or not is_compiled():
        return by_torch
    rule, live, per_tensor = rule_of(spec, shift=shift), has_live_codes(spec), isinstance(spec.granularity, PerTensor)

    def compiled(x: torch.Tensor) -> tuple[torch.Tensor, QParams]:
        if not x.is_cpu:
            return by_torch(x)
        dtype = x.dtype
        if dtype is not torch.bfloat16 and dtype is not torch.float32:
            x = x.float()
        x = x.contiguous()
        if live and (not per_tensor or x.shape[0] == 1):
            codes, scale, zero = live_codes(x, spec, rule)
            if per_tensor:
                shape = spec.split.scale_shape(tuple(x.shape))
                scale, zero = scale.reshape(shape), zero.reshape(shape)
            return codes.view(torch.int8), QParams(scale, zero)
        params = quantizer.params_for(x) or _live_params(x, spec, dtype)
        inverse = (1.0 / params.scale.float()).reshape(-1)
        zero = params.zero_point
        zero = None if zero is None or (spec.symmetric and spec.dtype.signed) else zero.float().contiguous()
        codes = run_codes(x, x.shape[1], inverse, zero, rule)
        return codes.view(torch.int8).reshape(x.shape), params

    return compiled


def _live_params(x: torch.Tensor, spec: TensorSpec, dtype: torch.dtype) -> QParams:
    """Scale and zero point of x, which was of `dtype`, from its own range."""
    low, high = ranges(x, x.shape[1])
    if isinstance(spec.granularity, PerTensor):
        low, high = low.amin(), high.amax()
    shape = spec.split.scale_shape(tuple(x.shape))
    return qparams_from_range(low.reshape(shape), high.reshape(shape), spec, str(dtype).removeprefix("torch."))
