"""Lowering of what says where Q/DQ stand, and how they and the constants behind them are written."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from quark.core.spec import LayerSpec
from quark.errors import ConfigError
from quark.onnx.config.extra_options import value_of
from quark.onnx.config.lowering.passes import computes_in_float32
from quark.onnx.config.lowering.request import Request
from quark.onnx.config.lowering.solved_weights import nbits_params
from quark.onnx.config.lowering.tensors import is_integer
from quark.onnx.config.settings import QDQSettings
from quark.onnx.operators import ACTIVATIONS, FUSE_ACTIVATIONS, RULES


def lower_qdq(request: Request, layer: LayerSpec) -> QDQSettings:
    """Where Q/DQ stand, and how they are written.

    Args:
        request: What the config asks for.
        layer: The specs of every node.

    Raises:
        ConfigError: An option has no meaning.
    """
    options = request.options
    return QDQSettings(
        target=request.target.name,
        target_given=value_of(options, "Target") is not None,
        fused=_fused(options),
        float_output_types=tuple(value_of(options, "OpTypesToExcludeOutputQuantization")),
        float_outputs=tuple(value_of(options, "NodesToExcludeOutputQuantization")),
        fold_relu=value_of(options, "FoldRelu"),
        align=_align(request),
        force_pass_through=value_of(options, "ForceQuantizeNoInputCheck"),
        dedicated_pairs=value_of(options, "DedicatedQDQPair"),
        dedicated_dequantize=value_of(options, "DedicateDQNode"),
        dual_pairs=value_of(options, "EnableDualQuantNodePairs"),
        # Float and block weights are float values behind a Q/DQ pair in any case.
        float_weights=is_integer(request.weight) and bool(value_of(options, "AddQDQPairToWeight")),
        int16_bias=value_of(options, "Int16Bias"),
        fit_int32_bias=value_of(options, "AdjustWeightScaleForInt32Bias"),
        matmul_nbits=nbits_params(options)["AccuracyLevel"] if request.matmul_nbits else None,
        quantize_fp16=value_of(options, "QuantizeFP16") and not computes_in_float32(options),
        contrib_domain=_contrib_domain(request, layer),
        cast_bfloat16=value_of(options, "BF16QDQToCast"),
        clip_bfloat16=value_of(options, "BF16WithClip"),
    )


def _fused(options: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """(op type, op type of its only reader) with nothing quantized between."""
    activations = [name for name in (*ACTIVATIONS, "Gelu") if value_of(options, f"RemoveQDQConv{name}")]
    pairs = set(product(FUSE_ACTIVATIONS, activations))
    if value_of(options, "RemoveQDQMulAdd"):
        pairs.add(("Mul", "Add"))
    if value_of(options, "RemoveQDQInstanceNorm"):
        pairs |= {("InstanceNormalization", name) for name in ("Relu", "LeakyRelu", "PRelu")}
    for pair in value_of(options, "RemoveQDQBetweenOps") or ():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(name in RULES for name in pair):
            raise ConfigError(f"RemoveQDQBetweenOps: expected pairs of op types with a rule, got {pair!r}.")
        pairs.add((pair[0], pair[1]))
    return frozenset(pairs)


def _align(request: Request) -> tuple[str, ...]:
    """Op types whose inputs and output share one scale: by their options, else all in the XINT8 path."""
    given = {name: value_of(request.options, f"Align{name}") for name in ("Concat", "Pool", "Pad", "Slice")}
    return tuple(name for name, value in given.items() if (request.npu_cnn if value is None else value))


def _contrib_domain(request: Request, layer: LayerSpec) -> bool:
    """com.microsoft Q/DQ: of integers in the extended formats, unless an option says otherwise."""
    given: bool | None = value_of(request.options, "UseQDQContribOps")
    if given is not None:
        return given
    return request.extended and any(spec is not None and spec.has_zero_point for spec in (layer.weight, layer.input))
