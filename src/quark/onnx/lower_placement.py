"""Lowering of the options that say where Q/DQ stand, and how constants are stored behind them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from quark.errors import ConfigError
from quark.onnx.operators import ACTIVATIONS, FUSE_ACTIVATIONS, RULES
from quark.onnx.options import value_of

FIELDS = {
    "dedicated_pairs": "DedicatedQDQPair",
    "dedicated_dequantize": "DedicateDQNode",
    "int16_bias": "Int16Bias",
    "fit_int32_bias": "AdjustWeightScaleForInt32Bias",
    "unsigned_relu": "UseUnsignedReLU",
}
"""Field of Settings -> the option that is its value."""


def placement_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Settings that these options give."""
    return {
        "fused": _fused(options),
        "float_output_types": tuple(value_of(options, "OpTypesToExcludeOutputQuantization")),
        "float_outputs": tuple(value_of(options, "NodesToExcludeOutputQuantization")),
        "channel_axes": _channel_axes(value_of(options, "QDQOpTypePerChannelSupportToAxis")),
        "float_weights": bool(value_of(options, "AddQDQPairToWeight")),
        **{name: value_of(options, option) for name, option in FIELDS.items()},
    }


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


def _channel_axes(axes: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    for name, axis in axes.items():
        if name not in RULES or RULES[name].weight is None or not isinstance(axis, int) or isinstance(axis, bool):
            possible = ", ".join(op for op, rule in RULES.items() if rule.weight is not None)
            raise ConfigError(
                f"QDQOpTypePerChannelSupportToAxis: {name!r}: {axis!r}; expected an axis of one of {possible}."
            )
    return tuple(axes.items())
