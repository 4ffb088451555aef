"""int8_codes: the codes of a layer's input, made in two compiled passes instead of nine of torch.

    code = clamp(round(x * (1 / scale)) + zero_point, qmin, qmax) - shift,    shift = 128 for unsigned codes, else 0

The scale is what `quark.core` makes of the range, and the codes are those of `quark.core.quantize`. Where this machine
has no compiler, and for roundings and dtypes that are rare, `quark.core` makes them.
"""

from __future__ import annotations

import torch

from quark.core.granularity import PerTensor
from quark.core.rounding import RoundType
from quark.core.runs import COMPILED, is_compiled, ranges, rule_of
from quark.core.runs import codes as run_codes
from quark.core.scales import QParams, qparams_from_range
from quark.core.spec import TensorSpec
from quark.torch.kernels.kernel import input_codes
from quark.torch.layers.fake_quant import FakeQuantize


def int8_codes(x: torch.Tensor, quantizer: FakeQuantize) -> tuple[torch.Tensor, QParams]:
    """Codes of the rows of x under a scale per row or tensor.

    Args:
        x: (rows, in_features).
        quantizer: Of int8 or uint8, one level of scales.

    Returns:
        int8 codes of the shape of x, unsigned ones moved by -128; scale and zero point, not moved.
    """
    spec = quantizer.spec
    shift = 0.0 if spec.dtype.signed else 128.0
    compiled = x.device.type == "cpu" and spec.rounding is RoundType.half_even
    if not compiled or not is_compiled():
        codes, params = input_codes(x, quantizer)
        return (codes - shift if shift else codes).to(torch.int8), params
    dtype = x.dtype
    x = (x if str(dtype).removeprefix("torch.") in COMPILED else x.float()).contiguous()
    params = quantizer.params_for(x) or _live_params(x, spec, dtype)
    inverse = (1.0 / params.scale.float()).reshape(-1)
    zero = params.zero_point
    zero = None if zero is None or (spec.symmetric and spec.dtype.signed) else zero.float().contiguous()
    codes = run_codes(x, x.shape[1], inverse, zero, rule_of(spec, shift=shift))
    return codes.view(torch.int8).reshape(x.shape), params


def _live_params(x: torch.Tensor, spec: TensorSpec, dtype: torch.dtype) -> QParams:
    """Scale and zero point of x, which was of `dtype`, from its own range."""
    low, high = ranges(x, x.shape[1])
    if isinstance(spec.granularity, PerTensor):
        low, high = low.amin(), high.amax()
    shape = spec.split.scale_shape(tuple(x.shape))
    return qparams_from_range(low.reshape(shape), high.reshape(shape), spec, str(dtype).removeprefix("torch."))
