"""The legacy config classes: QuantizationConfig (flat, in ONNX Runtime's terms) and Config, which holds one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from quark.base.checked import changed_fields, checked, config_table, known_keys
from quark.errors import ConfigError
from quark.onnx.config.enums import (
    CalibrationMethod,
    ExtendedQuantFormat,
    ExtendedQuantType,
    Int16Method,
    LayerWiseMethod,
    PowerOfTwoMethod,
    QuantFormat,
    QuantType,
    VitisQuantFormat,
    VitisQuantType,
    element_type,
)
from quark.onnx.config.extra_options import check_options
from quark.onnx.config.preset_rows import make_legacy
from quark.onnx.config.serialized import as_scope, from_json, to_json

__all__ = ["Config", "QuantizationConfig"]


ENUMS: Mapping[str, tuple[type[Enum], ...]] = {
    "calibrate_method": (CalibrationMethod, PowerOfTwoMethod, Int16Method, LayerWiseMethod),
    "quant_format": (QuantFormat, ExtendedQuantFormat, VitisQuantFormat),
    "activation_type": (QuantType, ExtendedQuantType, VitisQuantType),
    "weight_type": (QuantType, ExtendedQuantType, VitisQuantType),
}

Texts = list[str]


@checked
@dataclass(eq=False)
class QuantizationConfig:
    """The quantization of a model in one flat list; QConfig says more with less.

    Attributes:
        calibrate_method: How ranges are found; a PowerOfTwoMethod also makes the scales powers of two.
        quant_format: QDQ of QuantFormat is ai.onnx, of the extended formats com.microsoft.
        activation_type, weight_type: Element types.
        input_nodes, output_nodes: Quantize between them only.
        op_types_to_quantize, nodes_to_quantize: Only these; empty: all.
        extra_op_types_to_quantize: Beside the default ones.
        nodes_to_exclude, subgraphs_to_exclude: Stay in float.
        specific_tensor_precision: Recorded only: MixedPrecisionTensor is obeyed where it is given.
        execution_providers: Of calibration.
        per_channel: One weight scale for each output channel.
        reduce_range: 7-bit codes; not in this version.
        optimize_model: Fold BatchNormalization.
        use_dynamic_quant: Scales from live tensors; not in this version.
        use_external_data_format: Write weights beside the model.
        convert_fp16_to_fp32: Quantize a float16 model as a float32 one.
        convert_nchw_to_nhwc: Make image inputs NHWC; calibration data of the model as it is are moved.
        include_sq, include_rotation, include_auto_mp, include_fast_ft: Run the algorithm that the options describe.
        include_cle: Equalize the channels of consecutive layers (CLE) where a weight has one scale and the
            outputs for the calibration samples come nearer to the float ones by it. A CLE option that differs from
            its default, or a CLEConfig, runs it in any case.
        enable_npu_cnn: The XINT8 path.
        enable_npu_transformer: Gemm and MatMul with a constant operand only.
        crypto_mode: Nothing about the model on the disk in clear, or in the log.
        debug_mode, print_summary, ignore_warnings, log_severity_level: Recorded only.
        extra_options: Everything else; extra_options.py lists them.

    Raises:
        ConfigError: a field or an option is unknown or of the wrong type.
    """

    calibrate_method: Any = CalibrationMethod.MinMax
    quant_format: Any = QuantFormat.QDQ
    activation_type: Any = QuantType.QInt8
    weight_type: Any = QuantType.QInt8
    input_nodes: Texts = field(default_factory=list)
    output_nodes: Texts = field(default_factory=list)
    op_types_to_quantize: Texts = field(default_factory=list)
    nodes_to_quantize: Texts = field(default_factory=list)
    extra_op_types_to_quantize: Texts = field(default_factory=list)
    nodes_to_exclude: Texts = field(default_factory=list)
    subgraphs_to_exclude: list[Any] = field(default_factory=list)
    specific_tensor_precision: bool = False
    execution_providers: Texts = field(default_factory=lambda: ["CPUExecutionProvider"])
    per_channel: bool = False
    reduce_range: bool = False
    optimize_model: bool = True
    use_dynamic_quant: bool = False
    use_external_data_format: bool = False
    convert_fp16_to_fp32: bool = False
    convert_nchw_to_nhwc: bool = False
    include_sq: bool = False
    include_rotation: bool = False
    include_cle: bool = True
    include_auto_mp: bool = False
    include_fast_ft: bool = False
    enable_npu_cnn: bool = False
    enable_npu_transformer: bool = False
    debug_mode: bool = False
    crypto_mode: bool = False
    print_summary: bool = True
    ignore_warnings: bool = True
    log_severity_level: int | None = None
    extra_options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """A short table of what differs from the defaults."""
        return config_table("QuantizationConfig", changed_fields(self).items())

    @classmethod
    def _accept(cls, values: dict[str, Any]) -> None:
        for entry in fields(cls):
            value = values.get(entry.name)
            if isinstance(value, tuple) and str(entry.type) in ("Texts", "list[Any]"):
                values[entry.name] = list(value)

    def _check(self) -> None:
        for name, kinds in ENUMS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds):
                shown = " or ".join(kind.__name__ for kind in kinds)
                raise ConfigError(f"QuantizationConfig.{name}: expected {shown}, got {value!r}.")
        for name in ("activation_type", "weight_type"):
            element_type(getattr(self, name), self.quant_format)
        for entry in self.subgraphs_to_exclude:
            as_scope(entry)
        check_options(self.extra_options, "QuantizationConfig.extra_options")

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON holds them; enums as "QuantType.QInt8"."""
        return {entry.name: to_json(getattr(self, entry.name)) for entry in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QuantizationConfig:
        """Read what `to_dict` wrote; absent fields have their defaults."""
        return cls(**{name: from_json(value) for name, value in known_keys(data, cls).items()})


@checked
@dataclass(eq=False)
class Config:
    """The older form of QConfig. `global_quant_config` may be the name of a configuration ("A8W8")."""

    global_quant_config: QuantizationConfig

    def __repr__(self) -> str:
        """That of what it holds, under its own name."""
        return repr(self.global_quant_config).replace("QuantizationConfig", "Config", 1)

    @classmethod
    def _accept(cls, values: dict[str, Any]) -> None:
        if isinstance(values.get("global_quant_config"), str):
            values["global_quant_config"] = make_legacy(values["global_quant_config"], QuantizationConfig)

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON holds it."""
        return {"global_quant_config": self.global_quant_config.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Config:
        """Read what `to_dict` wrote."""
        values = known_keys(data, cls)
        return cls(QuantizationConfig.from_dict(values.get("global_quant_config", {})))
