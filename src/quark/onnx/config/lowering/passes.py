"""Lowering of the options that ask for graph passes.

SkipPreprocess leaves out every pass that no option asks for by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.errors import ConfigError
from quark.onnx.config.extra_options import value_of
from quark.onnx.config.lowering.request import Request
from quark.onnx.passes import PASSES, Pass
from quark.onnx.passes.convert_float import KEEP_IO_TYPES, convert_fp16_to_fp32
from quark.onnx.passes.simplify import simplify
from quark.onnx.passes.slim import check_slim_options


def lower_passes(request: Request) -> dict[str, object]:
    """Name of every pass -> its argument, True, or False or None to leave it out."""
    options = request.options
    casts = value_of(options, "BF16QDQToCast") or value_of(options, "EnableVaimlBF16")
    for_npu = request.npu_cnn or request.npu_transformer or (request.extended and not casts)
    arguments: dict[str, object] = {}
    for name, row in PASSES.items():
        value = options.get(row.option)
        if value is None:
            value = None if value_of(options, "SkipPreprocess") else _default(row, options, for_npu)
        arguments[name] = tuple(value) if isinstance(value, list) else value
    slim_options = value_of(options, "SimplifyModelOptions")
    check_slim_options(slim_options)
    if slim_options and arguments[simplify.__name__]:
        arguments[simplify.__name__] = dict(slim_options)
    if computes_in_float32(options) or _float16_becomes_float32(request):
        arguments[convert_fp16_to_fp32.__name__] = KEEP_IO_TYPES
    return arguments


def computes_in_float32(options: Mapping[str, Any]) -> bool:
    """Whether a float16 model becomes float32 between its inputs and outputs. Raises ConfigError."""
    if not value_of(options, "UseFP32Scale"):
        return False
    if not value_of(options, "QuantizeFP16") or value_of(options, "ConvertFP16ToFP32"):
        raise ConfigError(
            "UseFP32Scale=True is for float16 models: it goes with QuantizeFP16=True, and keeps inputs and outputs "
            "float16, which ConvertFP16ToFP32=True does not."
        )
    return True


def _float16_becomes_float32(request: Request) -> bool:
    """Whether a float16 model becomes float32 without being asked: the kernels of the target are of float32."""
    options = request.options
    given = any(value_of(options, name) for name in ("QuantizeFP16", "ConvertFP16ToFP32", "SkipPreprocess"))
    return bool(request.target.activations) and not given


def _default(row: Pass, options: Mapping[str, Any], for_npu: bool) -> Any:
    """The argument of a pass whose option is left out."""
    if row.default_option:
        return value_of(options, row.default_option)
    return for_npu if row.for_npu else row.default
