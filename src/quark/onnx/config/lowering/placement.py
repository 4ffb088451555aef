"""Lowering of the options that say where Q/DQ stand, and how constants are stored behind them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from itertools import product
from typing import Any

from quark.core.dtypes import DTYPES
from quark.errors import ConfigError, NotSupportedError, did_you_mean
from quark.onnx.config.enums import ExtendedQuantFormat, element_type
from quark.onnx.config.extra_options import value_of
from quark.onnx.config.lowering.tensors import data_type_of
from quark.onnx.config.settings import Override
from quark.onnx.operators import ACTIVATIONS, FUSE_ACTIVATIONS, RULES

FIELDS = {
    "dedicated_pairs": "DedicatedQDQPair",
    "dedicated_dequantize": "DedicateDQNode",
    "dual_pairs": "EnableDualQuantNodePairs",
    "int16_bias": "Int16Bias",
    "fit_int32_bias": "AdjustWeightScaleForInt32Bias",
    "unsigned_relu": "UseUnsignedReLU",
}
"""Field of Settings -> the option that is its value."""
OVERRIDE_KEYS = {
    "quant_type": "dtype",
    "symmetric": "symmetric",
    "axis": "axis",
    "scale": "scale",
    "zero_point": "zero_point",
    "rmin": "low",
    "rmax": "high",
}
"""Key of an entry of TensorQuantOverrides -> field of Override."""


def placement_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Settings that these options give."""
    return {
        "fused": _fused(options),
        "float_output_types": tuple(value_of(options, "OpTypesToExcludeOutputQuantization")),
        "float_outputs": tuple(value_of(options, "NodesToExcludeOutputQuantization")),
        "channel_axes": _channel_axes(value_of(options, "QDQOpTypePerChannelSupportToAxis")),
        "float_weights": bool(value_of(options, "AddQDQPairToWeight")),
        "overrides": _overrides(options),
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


def _overrides(options: Mapping[str, Any]) -> tuple[tuple[str, Override], ...]:
    """What TensorQuantOverrides and MixedPrecisionTensor say of single tensors; the first wins."""
    found = {
        name: Override(dtype=_integer(kind, options, "MixedPrecisionTensor"))
        for kind, names in value_of(options, "MixedPrecisionTensor").items()
        for name in names
    }
    for name, entries in value_of(options, "TensorQuantOverrides").items():
        where = f"TensorQuantOverrides[{name!r}]"
        if not isinstance(entries, (list, tuple)) or len(entries) != 1 or not isinstance(entries[0], dict):
            raise ConfigError(f"{where}: expected a list of one dict, got {entries!r}.")
        entry = dict(entries[0])
        for key in ("reduce_range", "convert"):
            if entry.pop(key, None):
                raise NotSupportedError(f"{where}: {key!r} is not part of this version.")
        if "quant_type" in entry:
            entry["quant_type"] = _integer(entry["quant_type"], options, where)
        unknown = sorted(set(entry) - set(OVERRIDE_KEYS))
        if unknown:
            raise ConfigError(f"{where}: unknown key {unknown[0]!r}. {did_you_mean(unknown[0], OVERRIDE_KEYS)}")
        for pair in (("scale", "zero_point"), ("rmin", "rmax")):
            if (pair[0] in entry) != (pair[1] in entry):
                raise ConfigError(f"{where}: {pair[0]} and {pair[1]} go together.")
        found[name] = Override(**{OVERRIDE_KEYS[key]: value for key, value in entry.items()})
    return tuple(found.items())


def _integer(kind: Any, options: Mapping[str, Any], where: str) -> str:
    """The name in core of an integer quantization type."""
    if not isinstance(kind, Enum):
        raise ConfigError(f"{where}: expected a QuantType or ExtendedQuantType, got {kind!r}.")
    core = data_type_of(element_type(kind, ExtendedQuantFormat.QDQ), options).core
    if "int" not in core or core not in DTYPES or DTYPES[core].is_block:
        raise NotSupportedError(f"{where}: {kind} of single tensors is not part of this version; use integers.")
    return core


def _channel_axes(axes: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    for name, axis in axes.items():
        if name not in RULES or RULES[name].weight is None or not isinstance(axis, int) or isinstance(axis, bool):
            possible = ", ".join(op for op, rule in RULES.items() if rule.weight is not None)
            raise ConfigError(
                f"QDQOpTypePerChannelSupportToAxis: {name!r}: {axis!r}; expected an axis of one of {possible}."
            )
    return tuple(axes.items())
