"""Request: where the two generations of configs meet. The specs of activations and weights, and the options.

Options overrule specs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from quark.errors import NotSupportedError
from quark.onnx.config.algo_configs import AlgoConfig, GPTQConfig
from quark.onnx.config.config import QConfig
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
from quark.onnx.config.extra_options import check_options, value_of
from quark.onnx.config.layer_config import QLayerConfig
from quark.onnx.config.legacy import QuantizationConfig
from quark.onnx.config.lowering.algorithms import lower_algorithms
from quark.onnx.config.lowering.tensors import data_type_of
from quark.onnx.config.tensor_specs import QTensorConfig
from quark.onnx.operators.targets import TARGETS, Target

_UNSUPPORTED_FIELDS = {"reduce_range": "7-bit codes are not part of this version"}
_FIELD_OPTIONS = {
    "crypto_mode": "CryptoMode",
    "input_nodes": "InputNodes",
    "output_nodes": "OutputNodes",
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
_LEGACY_METHODS: Mapping[Enum, tuple[CalibMethod, ScaleType]] = {
    **{method: (CalibMethod[method.name], ScaleType.Float32) for method in CalibrationMethod},
    PowerOfTwoMethod.NonOverflow: (CalibMethod.MinMax, ScaleType.PowerOf2),
    PowerOfTwoMethod.MinMSE: (CalibMethod.MinMSE, ScaleType.PowerOf2),
    Int16Method.MinMax: (CalibMethod.MinMax, ScaleType.Int16),
    LayerWiseMethod.LayerWisePercentile: (CalibMethod.LayerwisePercentile, ScaleType.Float32),
}
"""Legacy calibration method -> how the range is found, and which scales there are."""
FLAGS = ("include_cle", "include_sq", "include_rotation", "include_fast_ft", "include_auto_mp")


@dataclass(frozen=True)
class Request:
    """The content of a config of either generation.

    Attributes:
        layer: Specs of every node; the weight has one.
        options: The extra options that are given.
        extended: Whether Q/DQ of com.microsoft, or the extended operators, are written.
        npu_cnn: Whether this is the XINT8 path.
        algorithms: In their order.
        legacy: Whether this is a config of the older generation, whose named configurations have defaults of their own.
        include_cle: Whether the model is equalized where that pays; only of the legacy config.
        external_data: Write weights beside the model.
        dynamic: Whether activations are quantized as they come.
        by_name: Specs of single layers -> scopes.
        by_type: Specs of op types, None for float -> op types.
        exclude: Scopes that stay in float.
    """

    layer: QLayerConfig
    options: Mapping[str, Any]
    extended: bool
    npu_cnn: bool
    algorithms: tuple[AlgoConfig, ...]
    external_data: bool
    legacy: bool = False
    include_cle: bool = False
    dynamic: bool = False
    by_name: Mapping[QLayerConfig, list[Any]] = field(default_factory=dict)
    by_type: Mapping[QLayerConfig | None, list[str]] = field(default_factory=dict)
    exclude: tuple[Any, ...] = ()

    @property
    def weight(self) -> QTensorConfig:
        """The spec of weights."""
        assert self.layer.weight is not None
        return self.layer.weight

    @property
    def target(self) -> Target:
        """The target profile; the guides' extended formats and the XINT8 path are the NPU's."""
        name: str | None = value_of(self.options, "Target")
        if name is None:
            name = "npu" if self.npu_cnn or self.extended else "generic"
        return TARGETS[name]

    @property
    def npu_transformer(self) -> bool:
        """True where this is the path of NPU transformers: Gemm and MatMul only."""
        return bool(value_of(self.options, "EnableNPUTransformer"))

    @property
    def matmul_nbits(self) -> bool:
        """True where MatMuls become MatMulNBits nodes."""
        return bool(value_of(self.options, "UseMatMulNBits"))

    @property
    def gptq(self) -> GPTQConfig | None:
        """GPTQ, where it is one of the algorithms."""
        return next((algorithm for algorithm in self.algorithms if isinstance(algorithm, GPTQConfig)), None)

    @property
    def weights_only(self) -> bool:
        """True where activations stay in float."""
        return self.matmul_nbits or bool(self.options.get("WeightsOnly", self.gptq is not None))


def from_qconfig(config: QConfig) -> Request:
    """The request of a QConfig."""
    layer, options = config.global_config, config.extra_options
    check_options(options, "QConfig.extra_options")
    specs = [spec for spec in (layer.input_tensors, layer.weight) if spec is not None]
    plain = all(spec.data_type.core in ("int4", "uint4", "int8", "uint8") for spec in specs)
    power_of_two = all(spec.scale_type is ScaleType.PowerOf2 for spec in specs)
    return Request(
        layer,
        options,
        extended=not plain,
        npu_cnn=bool(options.get("EnableNPUCnn", power_of_two)),
        algorithms=lower_algorithms(config.algo_config, options, {}),
        external_data=config.use_external_data_format,
        by_name=config.specific_layer_config,
        by_type=config.layer_type_config,
        exclude=(*config.exclude, *value_of(config.extra_options, "NodesToExclude")),
    )


def from_legacy(config: QuantizationConfig) -> Request:
    """The request of a legacy config.

    Raises:
        NotSupportedError: A field has a value that this version cannot obey.
    """
    check_options(config.extra_options, "QuantizationConfig.extra_options")
    for name, why in _UNSUPPORTED_FIELDS.items():
        value = getattr(config, name)
        if value:
            raise NotSupportedError(f"QuantizationConfig.{name}={value!r}: {why}.")
    if config.quant_format.name == "QOperator":
        raise NotSupportedError("quant_format QOperator is not part of this version; possible: QDQ.")
    options = {option: getattr(config, name) for name, option in _FIELD_OPTIONS.items()}
    options.update(config.extra_options)
    return Request(
        _legacy_layer(config, options),
        options,
        extended=is_extended(config.quant_format),
        npu_cnn=bool(options.get("EnableNPUCnn", config.enable_npu_cnn)),
        algorithms=lower_algorithms((), options, {name: getattr(config, name) for name in FLAGS}),
        external_data=config.use_external_data_format,
        legacy=True,
        include_cle=config.include_cle,
        dynamic=config.use_dynamic_quant,
        exclude=(
            *config.nodes_to_exclude,
            *value_of(config.extra_options, "NodesToExclude"),
            *config.subgraphs_to_exclude,
        ),
    )


def _legacy_layer(config: QuantizationConfig, options: Mapping[str, Any]) -> QLayerConfig:
    """The specs of a legacy config: unsigned types have a zero point, and so have signed activations."""
    method, scale = _LEGACY_METHODS[config.calibrate_method]

    def tensor(quant_type: Enum, asymmetric: tuple[str, ...]) -> QTensorConfig:
        data_type = data_type_of(element_type(quant_type, config.quant_format), options)
        return QTensorConfig(not data_type.core.startswith(asymmetric), scale, method, data_type=data_type)

    activation, weight = tensor(config.activation_type, ("uint", "int")), tensor(config.weight_type, ("uint",))
    if config.per_channel:
        weight.set_quant_granularity(QuantGranularity.Channel)
    if scale is ScaleType.Float32:
        weight.set_calibration_method(CalibMethod.MinMax)
    return QLayerConfig(input_tensors=activation, weight=weight)
