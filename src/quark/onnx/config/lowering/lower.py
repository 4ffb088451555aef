"""Lowering: QConfig, or the legacy Config, to Settings. Pure functions; nothing after them reads a config.

The two generations meet in a Request: the specs of activations and weights, and the options. Options overrule specs.

CLE: the legacy `include_cle=True` is a default, not a request, and without effect in this version. A CLEConfig, or a
CLE option that differs from its default, is passed on in `algorithms`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerChannel, PerTensor
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import ConfigError, NotSupportedError
from quark.onnx.config.algo_configs import AlgoConfig, GPTQConfig
from quark.onnx.config.config import Config, QConfig, QLayerConfig, QuantizationConfig
from quark.onnx.config.enums import (
    CalibMethod,
    CalibrationMethod,
    Int16Method,
    LayerWiseMethod,
    PowerOfTwoMethod,
    QuantGranularity,
    ScaleType,
    element_type,
    is_extended,
)
from quark.onnx.config.extra_options import check_options, refuse_unsupported, value_of
from quark.onnx.config.lowering.algorithms import lower_algorithms, targets
from quark.onnx.config.lowering.npu import npu_settings
from quark.onnx.config.lowering.passes import lower_passes
from quark.onnx.config.lowering.placement import placement_settings
from quark.onnx.config.lowering.tensors import data_type_of, is_integer, lower_gptq, lower_nbits, lower_tensor
from quark.onnx.config.serialized import as_scope
from quark.onnx.config.settings import Scope, Settings
from quark.onnx.config.tensor_specs import Int32, QTensorConfig
from quark.onnx.operators.targets import TARGETS

UNSUPPORTED_FIELDS = {
    "input_nodes": "exclude the nodes before them instead",
    "output_nodes": "exclude the nodes after them instead",
    "reduce_range": "7-bit codes are not part of this version",
    "crypto_mode": "not part of this version",
}
FIELD_OPTIONS = {
    "op_types_to_quantize": "OpTypesToQuantize",
    "nodes_to_quantize": "NodesToQuantize",
    "extra_op_types_to_quantize": "ExtraOpTypesToQuantize",
    "execution_providers": "ExecutionProviders",
    "optimize_model": "OptimizeModel",
    "enable_npu_transformer": "EnableNPUTransformer",
    "convert_fp16_to_fp32": "ConvertFP16ToFP32",
    "convert_nchw_to_nhwc": "ConvertNCHWToNHWC",
}
"""Legacy field -> the option that says the same, and wins."""

SOLVED = ("MatMul", "Gemm")
"""Op types whose weights GPTQ decides."""
FLAGS = ("include_cle", "include_sq", "include_rotation", "include_fast_ft", "include_auto_mp")


@dataclass(frozen=True)
class Request:
    """What a config of either generation asks for."""

    layer: QLayerConfig
    options: Mapping[str, Any]
    extended: bool
    npu_cnn: bool
    algorithms: tuple[AlgoConfig, ...]
    external_data: bool
    dynamic: bool = False
    by_name: Mapping[QLayerConfig, list[Any]] = field(default_factory=dict)
    by_type: Mapping[QLayerConfig | None, list[str]] = field(default_factory=dict)
    exclude: tuple[Any, ...] = ()


def lower(config: QConfig | Config | QuantizationConfig, algorithms: Sequence[AlgoConfig] = ()) -> Settings:
    """The settings of a config, which stays as it is.

    Args:
        config: The config.
        algorithms: Algorithms to run after its own.

    Raises:
        ConfigError: it is no config, or fields contradict each other.
        NotSupportedError: an option or a type that this version does not have.
    """
    if isinstance(config, QConfig):
        return _settings(_from_qconfig(config), algorithms)
    if isinstance(config, Config):
        config = config.global_quant_config
    if isinstance(config, QuantizationConfig):
        return _settings(_from_legacy(config), algorithms)
    raise ConfigError(f"Expected a QConfig or a Config, got {config!r} ({type(config).__name__}).")


def _from_qconfig(config: QConfig) -> Request:
    layer, options = config.global_config, config.extra_options
    check_options(options, "QConfig.extra_options")
    specs = [spec for spec in (layer.input_tensors, layer.weight) if spec is not None]
    plain = all(spec.data_type.core in ("int4", "uint4", "int8", "uint8") for spec in specs)
    npu = all(spec.scale_type is ScaleType.PowerOf2 for spec in specs)
    return Request(
        layer,
        options,
        extended=not plain,
        npu_cnn=bool(options.get("EnableNPUCnn", npu)),
        algorithms=lower_algorithms(config.algo_config, options, {}),
        external_data=config.use_external_data_format,
        by_name=config.specific_layer_config,
        by_type=config.layer_type_config,
        exclude=tuple(config.exclude),
    )


def _from_legacy(config: QuantizationConfig) -> Request:
    check_options(config.extra_options, "QuantizationConfig.extra_options")
    for name, why in UNSUPPORTED_FIELDS.items():
        value = getattr(config, name)
        if value:
            raise NotSupportedError(f"QuantizationConfig.{name}={value!r}: {why}.")
    if config.quant_format.name == "QOperator":
        raise NotSupportedError("quant_format QOperator is not part of this version; possible: QDQ.")
    options = {option: getattr(config, name) for name, option in FIELD_OPTIONS.items()}
    options.update(config.extra_options)
    method, scale = _legacy_method(config.calibrate_method)
    specs = []
    for name, kind in (("Activation", config.activation_type), ("Weight", config.weight_type)):
        data_type = data_type_of(element_type(kind, config.quant_format), options)
        asymmetric = ("uint",) if name == "Weight" else ("uint", "int")
        symmetric = not data_type.core.startswith(asymmetric)
        specs.append(QTensorConfig(symmetric, scale, method, data_type=data_type))
    activation, weight = specs
    if config.per_channel:
        weight.set_quant_granularity(QuantGranularity.Channel)
    if scale is ScaleType.Float32:
        weight.set_calibration_method(CalibMethod.MinMax)
    return Request(
        QLayerConfig(input_tensors=activation, weight=weight),
        options,
        extended=is_extended(config.quant_format),
        npu_cnn=bool(options.get("EnableNPUCnn", config.enable_npu_cnn)),
        algorithms=lower_algorithms((), options, {name: getattr(config, name) for name in FLAGS}),
        external_data=config.use_external_data_format,
        dynamic=config.use_dynamic_quant,
        exclude=(*config.nodes_to_exclude, *config.subgraphs_to_exclude),
    )


def _legacy_method(method: Any) -> tuple[CalibMethod, ScaleType]:
    """What a legacy calibration method says: how the range is found, and which scales there are."""
    if isinstance(method, PowerOfTwoMethod):
        name = CalibMethod.MinMSE if method is PowerOfTwoMethod.MinMSE else CalibMethod.MinMax
        return name, ScaleType.PowerOf2
    if isinstance(method, Int16Method):
        return CalibMethod.MinMax, ScaleType.Int16
    if isinstance(method, LayerWiseMethod):
        return CalibMethod.LayerwisePercentile, ScaleType.Float32
    assert isinstance(method, CalibrationMethod)
    return CalibMethod[method.name], ScaleType.Float32


def _settings(request: Request, further: Sequence[AlgoConfig] = ()) -> Settings:
    options = dict(request.options)
    layer, algorithms = request.layer, (*request.algorithms, *further)
    gptq = next((algorithm for algorithm in algorithms if isinstance(algorithm, GPTQConfig)), None)
    assert layer.weight is not None
    if not is_integer(layer.weight):
        # Float and block weights stay float values behind a Q/DQ pair: asking for it changes nothing.
        options.pop("AddQDQPairToWeight", None)
    refuse_unsupported(options)
    nbits = lower_nbits(options, gptq) if value_of(options, "UseMatMulNBits") else None
    weights_only = bool(options.get("WeightsOnly", gptq is not None)) or nbits is not None
    if nbits is not None:
        spec, int32_bias = LayerSpec(weight=nbits[0]), False
        options["OpTypesToQuantize"] = ["MatMul"]
    else:
        spec, int32_bias = _global_layer(request, weights_only)
    solved = None if gptq is None or nbits is not None else _solved_layer(request, gptq, spec)
    # Where nothing else says that activations stay in float, so does all that GPTQ does not solve.
    alone = solved and weights_only and not ("WeightsOnly" in options or value_of(options, "OpTypesToQuantize"))
    transformer = value_of(options, "EnableNPUTransformer")
    const_only = value_of(options, "MatMulConstBOnly")
    return Settings(
        layer=LayerSpec() if alone else spec,
        by_name=tuple(_by_name(request, spec, options, int32_bias)),
        by_type=(*(((SOLVED, solved),) if solved else ()), *_by_type(request, spec, options, int32_bias)),
        mixed=tuple((_own_layer(own, spec, options, int32_bias), names) for own, names in targets(algorithms, options)),
        exclude=tuple(map(as_scope, request.exclude)),
        op_types=_op_types(options, transformer),
        all_op_types=value_of(options, "QuantizeAllOpTypes"),
        extra_op_types=tuple(value_of(options, "ExtraOpTypesToQuantize")),
        nodes=tuple(value_of(options, "NodesToQuantize")),
        weights_only=weights_only,
        int32_bias=int32_bias,
        matmul_const_only=transformer if const_only is None else const_only,
        fold_relu=value_of(options, "FoldRelu"),
        align=_align(options, request.npu_cnn),
        force_pass_through=value_of(options, "ForceQuantizeNoInputCheck"),
        matmul_nbits=None if nbits is None else nbits[1],
        quantize_fp16=value_of(options, "QuantizeFP16"),
        contrib_domain=_contrib_domain(request, spec),
        cast_bfloat16=value_of(options, "BF16QDQToCast"),
        clip_bfloat16=value_of(options, "BF16WithClip"),
        refine_block_axis=value_of(options, "RefineBlockAxis"),
        target=_target(request),
        **npu_settings(options, request.npu_cnn, spec),
        **placement_settings(options),
        percentile=_percentile(options),
        percentile_candidates=tuple(value_of(options, "PercentileCandidates")),
        percentile_metric=value_of(options, "LWPMetric"),
        **_data(options),
        algorithms=algorithms,
        allow_noop=value_of(options, "AllowNoop"),
        external_data=request.external_data,
        providers=tuple(value_of(options, "ExecutionProviders")),
        **lower_passes(options, request.npu_cnn or transformer, request.extended),
    )


def _global_layer(request: Request, weights_only: bool) -> tuple[LayerSpec, bool]:
    """The specs of every node, and whether biases are int32."""
    layer, options = request.layer, request.options
    assert layer.weight is not None
    weight = lower_tensor(layer.weight, options, weight=True)
    if weights_only:
        return LayerSpec(weight=weight), False
    if request.dynamic:
        return LayerSpec(weight=weight, input=TensorSpec(DTYPES["uint8"], symmetric=False, dynamic=True)), False
    if layer.input_tensors is None:
        raise ConfigError("input_tensors has no spec; WeightsOnly=True needs none.")
    activation = lower_tensor(layer.input_tensors, options, weight=False)
    output = lower_tensor(layer.output_tensors, options, weight=False) if layer.output_tensors else activation
    if not value_of(options, "QuantizeBias"):
        return LayerSpec(weight, None, activation, output), False
    integers = is_integer(layer.weight) and is_integer(layer.input_tensors)
    int32 = value_of(options, "Int32Bias")
    if int32 is None:
        own = layer.bias is not None and layer.bias.data_type != Int32
        int32 = integers and not request.npu_cnn and not own
    elif int32 and not integers:
        raise ConfigError("Int32Bias=True needs integer activations and weights.")
    if int32:
        return LayerSpec(weight, None, activation, output), True
    bias = _one_scale(weight) if layer.bias is None else _lower_bias(layer.bias, options)
    return LayerSpec(weight, bias, activation, output), False


def _by_name(
    request: Request, base: LayerSpec, options: Mapping[str, Any], int32_bias: bool
) -> Iterator[tuple[tuple[Scope, ...], LayerSpec]]:
    for own, scopes in request.by_name.items():
        yield tuple(map(as_scope, scopes)), _own_layer(own, base, options, int32_bias)


def _by_type(
    request: Request, base: LayerSpec, options: Mapping[str, Any], int32_bias: bool
) -> Iterator[tuple[tuple[str, ...], LayerSpec | None]]:
    for own, names in request.by_type.items():
        yield tuple(names), None if own is None else _own_layer(own, base, options, int32_bias)


def _solved_layer(request: Request, config: GPTQConfig, spec: LayerSpec) -> LayerSpec:
    """The specs of the nodes that GPTQ solves."""
    if request.dynamic:
        raise NotSupportedError("GPTQ with dynamic activations is not part of this version; possible: static, or none.")
    assert spec.weight is not None
    return replace(spec, weight=lower_gptq(config, spec.weight))


def _one_scale(weight: TensorSpec) -> TensorSpec:
    """The spec of a bias that is quantized like its weight."""
    return replace(weight, granularity=PerTensor()) if isinstance(weight.granularity, PerChannel) else weight


def _lower_bias(bias: QTensorConfig, options: Mapping[str, Any]) -> TensorSpec:
    if bias.data_type == Int32:
        raise ConfigError("An int32 bias has the scale of its input times that of its weight: both must be integers.")
    return lower_tensor(bias, options, weight=True)


def _own_layer(own: QLayerConfig, base: LayerSpec, options: Mapping[str, Any], int32_bias: bool) -> LayerSpec:
    """The specs of single layers; what has none follows the global ones."""
    weight = lower_tensor(own.weight, options, weight=True) if own.weight else base.weight
    if base.input is None:
        return LayerSpec(weight=weight)
    activation = lower_tensor(own.input_tensors, options, weight=False) if own.input_tensors else base.input
    output = activation if own.input_tensors else base.output
    if own.output_tensors:
        output = lower_tensor(own.output_tensors, options, weight=False)
    bias = base.bias
    if own.bias is not None and not (int32_bias and own.bias.data_type == Int32):
        if int32_bias:
            asked = own.bias.data_type
            raise NotSupportedError(f"A bias of {asked} beside int32 ones is not in this version; set Int32Bias=False.")
        bias = _lower_bias(own.bias, options)
    elif int32_bias and weight is not None and not (weight.has_zero_point and activation.has_zero_point):
        # There is no int32 bias under a float or block type.
        bias = _one_scale(weight)
    return LayerSpec(weight, bias, activation, output)


def _op_types(options: Mapping[str, Any], transformer: bool) -> tuple[str, ...]:
    return tuple(value_of(options, "OpTypesToQuantize")) or (("Gemm", "MatMul") if transformer else ())


def _align(options: Mapping[str, Any], npu_cnn: bool) -> tuple[str, ...]:
    asked = {name: value_of(options, f"Align{name}") for name in ("Concat", "Pool", "Pad", "Slice")}
    return tuple(name for name, value in asked.items() if (npu_cnn if value is None else value))


def _contrib_domain(request: Request, spec: LayerSpec) -> bool:
    """com.microsoft Q/DQ: of integers in the extended formats, unless an option says otherwise."""
    asked: bool | None = value_of(request.options, "UseQDQContribOps")
    integers = any(tensor is not None and tensor.has_zero_point for tensor in (spec.weight, spec.input))
    return request.extended and integers if asked is None else asked


def _target(request: Request) -> str:
    """The guides' extended formats and the XINT8 path are the NPU's."""
    asked: str | None = value_of(request.options, "Target")
    if asked is None:
        return "npu" if request.npu_cnn or request.extended else "generic"
    return TARGETS[asked].name


def _percentile(options: Mapping[str, Any]) -> float:
    value = float(value_of(options, "Percentile"))
    if not 50 < value <= 100:
        raise ConfigError(f"Percentile={value}: it must be over 50 and at most 100.")
    return value


def _data(options: Mapping[str, Any]) -> dict[str, Any]:
    """What is calibrated on."""
    return {
        "calibration_samples": _samples(options),
        "statistics": value_of(options, "Statistics"),
        "random_data": value_of(options, "UseRandomData"),
        "random_shapes": _per_input(options, "RandomDataReaderInputShape"),
        "random_ranges": _per_input(options, "RandomDataReaderInputDataRange"),
    }


def _samples(options: Mapping[str, Any]) -> int | None:
    value: int | None = value_of(options, "CalibDataSize")
    if value is not None and value < 1:
        raise ConfigError(f"CalibDataSize={value}: at least one sample is needed.")
    return value


def _per_input(options: Mapping[str, Any], name: str) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Input name -> numbers, as Settings hold them."""
    given: Mapping[str, Any] = value_of(options, name) or {}
    for key, numbers in given.items():
        listed = isinstance(numbers, (list, tuple)) and all(isinstance(n, (int, float)) for n in numbers)
        if not listed:
            raise ConfigError(f"{name}: {key!r} needs a list of numbers, got {numbers!r}.")
    return tuple((key, tuple(numbers)) for key, numbers in given.items())
