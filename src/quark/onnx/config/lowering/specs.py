"""Lowering of what says which tensors are quantized, and to what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerChannel, PerTensor
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import ConfigError, NotSupportedError, did_you_mean
from quark.onnx.config.enums import ExtendedQuantFormat, element_type
from quark.onnx.config.extra_options import value_of
from quark.onnx.config.layer_config import QLayerConfig
from quark.onnx.config.lowering.algorithms import targets
from quark.onnx.config.lowering.request import Request
from quark.onnx.config.lowering.solved_weights import lower_gptq, lower_nbits
from quark.onnx.config.lowering.tensors import data_type_of, is_integer, lower_tensor
from quark.onnx.config.serialized import as_scope
from quark.onnx.config.settings import Override, SpecSettings
from quark.onnx.config.tensor_specs import Int32, QTensorConfig
from quark.onnx.operators import PRODUCTS, RULES

_OVERRIDE_KEYS = {
    "quant_type": "dtype",
    "symmetric": "symmetric",
    "axis": "axis",
    "scale": "scale",
    "zero_point": "zero_point",
    "rmin": "low",
    "rmax": "high",
}
"""Key of an entry of TensorQuantOverrides -> field of Override."""


def lower_layer(request: Request) -> tuple[LayerSpec, bool]:
    """The specs of every node, and whether biases are int32.

    Raises:
        ConfigError: Activations have no spec, or an int32 bias has floats beside it.
    """
    layer, options = request.layer, request.options
    if request.matmul_nbits:
        return LayerSpec(weight=lower_nbits(options, request.gptq)), False
    weight = lower_tensor(request.weight, options, weight=True)
    if request.weights_only:
        return LayerSpec(weight=weight), False
    if request.dynamic:
        return LayerSpec(weight=weight, input=TensorSpec(DTYPES["uint8"], symmetric=False, dynamic=True)), False
    if layer.input_tensors is None:
        raise ConfigError("input_tensors has no spec; WeightsOnly=True needs none.")
    activation = lower_tensor(layer.input_tensors, options, weight=False)
    output = lower_tensor(layer.output_tensors, options, weight=False) if layer.output_tensors else activation
    if not value_of(options, "QuantizeBias"):
        return LayerSpec(weight, None, activation, output), False
    if _has_int32_bias(request, is_integer(request.weight) and is_integer(layer.input_tensors)):
        return LayerSpec(weight, None, activation, output), True
    bias = _one_scale(weight) if layer.bias is None else _lower_bias(layer.bias, options)
    return LayerSpec(weight, bias, activation, output), False


def lower_specs(request: Request, layer: LayerSpec, int32_bias: bool) -> SpecSettings:
    """Which tensors are quantized, and to what.

    Args:
        request: What the config asks for.
        layer: The specs of every node.
        int32_bias: Whether biases are int32.

    Raises:
        ConfigError: An option has no meaning, or the specs of a layer contradict each other.
        NotSupportedError: What this version does not have.
    """
    options = request.options

    def single(config: QLayerConfig) -> LayerSpec:
        return _single_layer(config, layer, options, int32_bias)

    by_type = [(tuple(names), None if config is None else single(config)) for config, names in request.by_type.items()]
    solved = _solved_layer(request, layer)
    # Where nothing else says that activations stay in float, so does all that GPTQ does not solve.
    alone = request.weights_only and not ("WeightsOnly" in options or value_of(options, "OpTypesToQuantize"))
    const_only = value_of(options, "MatMulConstBOnly")
    # Whether bodies are quantized: by an option, else where activations have no ranges, which need runs of bodies.
    enabled: bool | None = value_of(request.options, "EnableSubgraph")
    bodies = (request.weights_only or request.dynamic) if enabled is None else enabled
    return SpecSettings(
        layer=LayerSpec() if solved and alone else layer,
        by_name=tuple((tuple(map(as_scope, scopes)), single(config)) for config, scopes in request.by_name.items()),
        # MatMul first, as messages name them.
        by_type=((PRODUCTS[::-1], solved), *by_type) if solved else tuple(by_type),
        mixed=tuple((single(config), names) for config, names in targets(request.algorithms, options)),
        exclude=tuple(map(as_scope, request.exclude)),
        first=tuple(value_of(options, "InputNodes")),
        last=tuple(value_of(options, "OutputNodes")),
        op_types=_op_types(request),
        all_op_types=value_of(options, "QuantizeAllOpTypes"),
        extra_op_types=tuple(value_of(options, "ExtraOpTypesToQuantize")),
        nodes=tuple(value_of(options, "NodesToQuantize")),
        weights_only=request.weights_only,
        int32_bias=int32_bias,
        matmul_const_only=request.npu_transformer if const_only is None else const_only,
        channel_axes=_channel_axes(value_of(options, "QDQOpTypePerChannelSupportToAxis")),
        refine_block_axis=value_of(options, "RefineBlockAxis"),
        # GPTQ says itself which weights share a scale.
        refine_weight_scales=value_of(options, "RefineWeightScales") and request.gptq is None,
        unsigned_relu=value_of(options, "UseUnsignedReLU"),
        overrides=_overrides(options),
        bodies=bodies,
    )


def _has_int32_bias(request: Request, integers: bool) -> bool:
    """Return True where biases are int32: by an option, else where activations and weights are integers."""
    int32: bool | None = value_of(request.options, "Int32Bias")
    if int32 is None:
        has_other_spec = request.layer.bias is not None and request.layer.bias.data_type != Int32
        return integers and not request.npu_cnn and not has_other_spec
    if int32 and not integers:
        raise ConfigError("Int32Bias=True needs integer activations and weights.")
    return int32


def _solved_layer(request: Request, layer: LayerSpec) -> LayerSpec | None:
    """The specs of the nodes that GPTQ solves; None where it does not run, or decides MatMulNBits."""
    if request.gptq is None or request.matmul_nbits:
        return None
    if request.dynamic:
        raise NotSupportedError("GPTQ with dynamic activations is not part of this version; possible: static, or none.")
    assert layer.weight is not None
    return replace(layer, weight=lower_gptq(request.gptq, layer.weight))


def _single_layer(config: QLayerConfig, base: LayerSpec, options: Mapping[str, Any], int32_bias: bool) -> LayerSpec:
    """The specs of single layers; what has none follows the specs of every node."""
    weight = lower_tensor(config.weight, options, weight=True) if config.weight else base.weight
    if base.input is None:
        return LayerSpec(weight=weight)
    activation, output = base.input, base.output
    if config.input_tensors:
        activation = output = lower_tensor(config.input_tensors, options, weight=False)
    if config.output_tensors:
        output = lower_tensor(config.output_tensors, options, weight=False)
    bias = base.bias
    if config.bias is not None and not (int32_bias and config.bias.data_type == Int32):
        # Its own grid, whatever biases of other layers are; an op without a bias has no use for it.
        bias = _lower_bias(config.bias, options)
    elif int32_bias and weight is not None and not (weight.has_zero_point and activation.has_zero_point):
        # There is no int32 bias under a float or block type.
        bias = _one_scale(weight)
    return LayerSpec(weight, bias, activation, output)


def _one_scale(weight: TensorSpec) -> TensorSpec:
    """The spec of a bias that is quantized like its weight."""
    return replace(weight, granularity=PerTensor()) if isinstance(weight.granularity, PerChannel) else weight


def _lower_bias(bias: QTensorConfig, options: Mapping[str, Any]) -> TensorSpec:
    if bias.data_type == Int32:
        raise ConfigError("An int32 bias has the scale of its input times that of its weight: both must be integers.")
    return lower_tensor(bias, options, weight=True)


def _op_types(request: Request) -> tuple[str, ...]:
    if request.matmul_nbits:
        return ("MatMul",)
    given = tuple(value_of(request.options, "OpTypesToQuantize"))
    return PRODUCTS if not given and request.npu_transformer else given


def _overrides(options: Mapping[str, Any]) -> tuple[tuple[str, Override], ...]:
    """Return what TensorQuantOverrides and MixedPrecisionTensor say of single tensors; the first wins."""
    overrides = {
        name: Override(dtype=_integer(kind, options, "MixedPrecisionTensor"))
        for kind, names in value_of(options, "MixedPrecisionTensor").items()
        for name in names
    }
    for name, entries in value_of(options, "TensorQuantOverrides").items():
        overrides[name] = _override(f"TensorQuantOverrides[{name!r}]", entries, options)
    return tuple(overrides.items())


def _override(where: str, entries: Any, options: Mapping[str, Any]) -> Override:
    """An entry of TensorQuantOverrides. Raises ConfigError and NotSupportedError."""
    if not isinstance(entries, (list, tuple)) or len(entries) != 1 or not isinstance(entries[0], dict):
        raise ConfigError(f"{where}: expected a list of one dict, got {entries!r}.")
    entry = dict(entries[0])
    for key in ("reduce_range", "convert"):
        if entry.pop(key, None):
            raise NotSupportedError(f"{where}: {key!r} is not part of this version.")
    if "quant_type" in entry:
        entry["quant_type"] = _integer(entry["quant_type"], options, where)
    unknown = sorted(set(entry) - set(_OVERRIDE_KEYS))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}. {did_you_mean(unknown[0], _OVERRIDE_KEYS)}")
    for one, other in (("scale", "zero_point"), ("rmin", "rmax")):
        if (one in entry) != (other in entry):
            raise ConfigError(f"{where}: {one} and {other} go together.")
    return Override(**{_OVERRIDE_KEYS[key]: value for key, value in entry.items()})


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
