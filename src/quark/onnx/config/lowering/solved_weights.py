"""Lowering of weights that have a form of their own: those of MatMulNBits nodes, and those that GPTQ solves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerChannel, PerGroup, PerTensor
from quark.core.spec import ScaleType, TensorSpec
from quark.errors import ConfigError, NotSupportedError, did_you_mean
from quark.onnx.config.algo_configs import GPTQConfig
from quark.onnx.config.extra_options import value_of
from quark.onnx.config.lowering.tensors import group_size

_NBITS_DEFAULTS = {"Algorithm": "DEFAULT", "GroupSize": 128, "Symmetric": True, "Bits": 4, "AccuracyLevel": 0}
_NBITS_ALGORITHMS = ("DEFAULT", "GPTQ", "HQQ")
_NBITS_SIZES = (16, 32, 64, 128, 256)
"""Blocks that MatMulNBits has in ONNX Runtime 1.31 (matmul_nbits.cc)."""
_NBITS_OF_GPTQ = {"bits": "Bits", "group_size": "GroupSize", "weight_symmetric": "Symmetric"}
"""Field of GPTQConfig -> the entry of MatMulNBitsParams that says the same."""


def nbits_params(options: Mapping[str, Any]) -> dict[str, Any]:
    """MatMulNBitsParams with defaults.

    Raises:
        ConfigError: An unknown entry or a wrong value.
        NotSupportedError: HQQ with 8 bits.
    """
    params = {**_NBITS_DEFAULTS, **value_of(options, "MatMulNBitsParams")}
    for key in params:
        if key not in _NBITS_DEFAULTS:
            raise ConfigError(f"MatMulNBitsParams has no entry {key!r}. {did_you_mean(str(key), _NBITS_DEFAULTS)}")
    if params["Algorithm"] not in _NBITS_ALGORITHMS:
        name = params["Algorithm"]
        raise ConfigError(f"MatMulNBitsParams.Algorithm: {name!r}. {did_you_mean(str(name), _NBITS_ALGORITHMS)}")
    if params["Bits"] not in (2, 4, 8) or params["AccuracyLevel"] not in range(5):
        raise ConfigError(
            f"MatMulNBitsParams: Bits={params['Bits']}, AccuracyLevel={params['AccuracyLevel']}; "
            "possible: Bits 2, 4 or 8, AccuracyLevel 0 to 4."
        )
    if params["Algorithm"] == "HQQ" and params["Bits"] == 8:
        raise NotSupportedError(
            "MatMulNBitsParams: HQQ has float zero points, which ONNX Runtime computes with 2 or 4 bits only."
        )
    return params


def lower_nbits(options: Mapping[str, Any], gptq: GPTQConfig | None = None) -> TensorSpec:
    """The spec of the weights of MatMulNBits nodes.

    Raises:
        ConfigError: An entry of MatMulNBitsParams is wrong, or a GPTQConfig asks for other weights.
        NotSupportedError: An op type other than MatMul.
    """
    if set(value_of(options, "OpTypesToQuantize")) - {"MatMul"}:
        raise NotSupportedError("UseMatMulNBits: only MatMul has such a form. Possible: OpTypesToQuantize=['MatMul'].")
    params = nbits_params(options)
    for name, key in _NBITS_OF_GPTQ.items():
        value = getattr(gptq or GPTQConfig, name)
        if value not in (getattr(GPTQConfig, name), params[key]):
            raise ConfigError(f"GPTQConfig.{name}={value}, MatMulNBitsParams.{key}={params[key]}: set only one.")
    size = group_size(params["GroupSize"], "MatMulNBitsParams.GroupSize")
    if size not in _NBITS_SIZES:
        possible = ", ".join(map(str, _NBITS_SIZES))
        raise ConfigError(
            f"MatMulNBitsParams.GroupSize={size}: the kernel has blocks of other sizes. Possible: {possible}."
        )
    if params["Algorithm"] == "HQQ":
        # Its zero points are what it solves, whatever Symmetric says.
        dtype = DTYPES[f"uint{params['Bits']}"]
        return TensorSpec(dtype, PerGroup(0, size, pad=True), symmetric=False, float_zero_point=True)
    name = f"{'int' if params['Symmetric'] else 'uint'}{params['Bits']}"
    return TensorSpec(DTYPES[name], PerGroup(0, size, pad=True), symmetric=params["Symmetric"])


def lower_gptq(config: GPTQConfig, base: TensorSpec) -> TensorSpec:
    """The spec of the weights that GPTQ solves; fewer than 4 or 8 bits are codes of these types that stay small.

    Args:
        config: The algorithm.
        base: The spec of other weights, which has the same kind of scale.

    Raises:
        ConfigError: A parameter out of range.
    """
    bits = config.bits
    if not 2 <= bits <= 8 or config.block_size < 1 or config.perc_damp < 0:
        raise ConfigError(
            f"GPTQConfig: bits={bits}, block_size={config.block_size}, perc_damp={config.perc_damp}; possible: bits "
            "2 to 8, block_size from 1, perc_damp from 0."
        )
    granularity: PerTensor | PerChannel | PerGroup = PerChannel(0) if config.per_channel else PerTensor()
    if config.group_size != -1:
        granularity = PerGroup(0, group_size(config.group_size, "GPTQConfig.group_size"), pad=True)
    dtype = DTYPES[f"{'int' if config.weight_symmetric else 'uint'}{4 if bits <= 4 else 8}"]
    low = -(1 << (bits - 1)) if config.weight_symmetric else 0
    dtype = replace(dtype, min=float(low), max=float(low + (1 << bits) - 1))
    scale_type, observer = ScaleType.float32, "min_max"
    if base.scale_type is ScaleType.int16:
        scale_type = base.scale_type
    if base.scale_type is ScaleType.pof2:
        scale_type, observer = base.scale_type, base.observer
    return TensorSpec(dtype, granularity, symmetric=config.weight_symmetric, scale_type=scale_type, observer=observer)
