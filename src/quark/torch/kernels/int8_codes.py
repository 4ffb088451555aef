"""int8_codes: the codes of a layer's input, made in two compiled passes instead of nine of torch.

    code = clamp(round(x * (1 / scale)) + zero_point, qmin, qmax) - shift,    shift = 128 for unsigned codes, else 0

The scale is what `quark.core` makes of the range, and the codes are those of `quark.core.quantize`. Where this machine
has no compiler, and for roundings and dtypes that are rare, `quark.core` makes them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quark import native
from quark.core.granularity import PerTensor
from quark.core.rounding import RoundType
from quark.core.scales import QParams, qparams_from_range
from quark.core.spec import TensorSpec
from quark.errors import OutputError, QuarkError
from quark.log import logger
from quark.torch.kernels.kernel import input_codes
from quark.torch.layers.fake_quant import FakeQuantize

COMPILED = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""dtypes with compiled passes; float16 is widened, which is exact."""


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
    functions = _library() if compiled else None
    if functions is None:
        codes, params = input_codes(x, quantizer)
        return (codes - shift if shift else codes).to(torch.int8), params
    dtype = x.dtype
    x = (x if dtype in COMPILED else x.float()).contiguous()
    params = quantizer.params_for(x) or _live_params(x, spec, dtype, functions)
    inverse = (1.0 / params.scale.float()).reshape(-1)
    zero = params.zero_point
    if zero is None or (spec.symmetric and spec.dtype.signed):
        zero = torch.zeros_like(inverse)
    zero = zero.float().contiguous()
    out = torch.empty(x.shape, dtype=torch.int8)
    functions[f"codes_{COMPILED[x.dtype]}"](
        x.data_ptr(),
        *x.shape,
        inverse.data_ptr(),
        zero.data_ptr(),
        int(len(inverse) > 1),
        spec.dtype.min,
        spec.dtype.max,
        shift,
        out.data_ptr(),
    )
    return out, params


def _live_params(x: torch.Tensor, spec: TensorSpec, dtype: torch.dtype, functions: dict[str, Any]) -> QParams:
    """Scale and zero point of x, which was of `dtype`, from its own range."""
    low, high = torch.empty(2, x.shape[0])
    functions[f"ranges_{COMPILED[x.dtype]}"](x.data_ptr(), *x.shape, low.data_ptr(), high.data_ptr())
    if isinstance(spec.granularity, PerTensor):
        low, high = low.amin(), high.amax()
    shape = spec.split.scale_shape(tuple(x.shape))
    return qparams_from_range(low.reshape(shape), high.reshape(shape), spec, str(dtype).removeprefix("torch."))


@cache
def _library() -> dict[str, Any] | None:
    """The compiled passes by name, or None where they cannot be built."""
    try:
        source = Path(__file__).with_name("int8_codes.cpp")
        library = ctypes.CDLL(str(native.library(source, "the maker of int8 codes", "torch makes them too.")))
    except (QuarkError, OutputError, OSError) as error:
        logger.debug("int8 codes of inputs are made by torch: %s", error)
        return None
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    arguments = {
        "ranges": [pointer, count, count, pointer, pointer],
        "codes": [pointer, count, count, pointer, pointer, count, number, number, number, pointer],
    }
    functions = {}
    for name, types in arguments.items():
        for dtype in COMPILED.values():
            function = getattr(library, f"{name}_{dtype}")
            function.argtypes, function.restype = types, None
            functions[f"{name}_{dtype}"] = function
    return functions
