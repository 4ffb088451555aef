"""The named configurations, one row each; presets.py makes configs of them.

Naming: activation type, weight type; A8W8 is int8 / int8. S signed, U unsigned; AAWS: activations asymmetric, weights
symmetric. `_ADAROUND` and `_ADAQUANT` add the learned rounding of that name.

The two generations differ where they have one name: A8W8 and A16W8 by name calibrate by MinMax, A8W8_QCONFIG and
A16W8_QCONFIG by percentile; XINT8 by name has uint8 activations (zero point 128), XINT8_QCONFIG int8.

Rows hold classes of specs and algorithms, not objects: making one loads pydantic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from quark.core.dtypes import DTYPES, MICRO_EXPONENT
from quark.core.names.registry import Registry
from quark.onnx.config.algo_configs import AdaQuantConfig, AdaRoundConfig, AlgoConfig
from quark.onnx.config.enums import (
    CalibrationMethod,
    ExtendedQuantFormat,
    ExtendedQuantType,
    PowerOfTwoMethod,
    QuantFormat,
    QuantType,
)
from quark.onnx.config.layer_config import QLayerConfig
from quark.onnx.config.tensor_specs import (
    OCP_BLOCK,
    BFloat16Spec,
    BFP16Spec,
    Int8Spec,
    Int16Spec,
    MXInt8Spec,
    QTensorConfig,
    XInt8Spec,
)
from quark.onnx_ops.operators import BFP_FORMATS

T = TypeVar("T")
Options = Mapping[str, Any]

MIN_MAX, PERCENTILE, MIN_MSE = CalibrationMethod.MinMax, CalibrationMethod.Percentile, PowerOfTwoMethod.MinMSE
FORCE: Options = {"ForceQuantizeNoInputCheck": True}
SYMMETRIC: Options = {"ActivationSymmetric": True, **FORCE}
ASYMMETRIC: Options = {"ActivationSymmetric": False, "WeightSymmetric": False, **FORCE}
ALIGNED: Options = {"AlignSlice": False, "FoldRelu": True, "AlignConcat": True}
A16W8: Options = {**FORCE, **ALIGNED, "AlignEltwiseQuantType": True}
OUTLIERS: Options = {"Percentile": 99.9999}
_MOVING_AVERAGE: Options = {"CalibMovingAverage": True}
TRANSFORMER: Options = {"enable_npu_transformer": True}
ADAROUND: Options = {
    "DataSize": 1000,
    "FixedSeed": 1705472343,
    "BatchSize": 2,
    "NumIterations": 1000,
    "LearningRate": 0.1,
    "OptimAlgorithm": "adaround",
    "OptimDevice": "cpu",
    "InferDevice": "cpu",
    "EarlyStop": True,
}
ADAQUANT: Options = {**ADAROUND, "LearningRate": 1e-5, "OptimAlgorithm": "adaquant"}
VINT8: Options = {
    "UseRandomData": True,
    "ConvertBNToConv": True,
    "ConvertSigmoidToHardSigmoid": False,
    "ConvertClipToRelu": True,
    "ConvertSplitToSlice": True,
    "SplitLargeKernelPool": False,
    "ReplaceClip6Relu": True,
    "ConvertReduceMeanToGlobalAvgPool": False,
    "RemoveQDQConvClip": False,
    "RemoveQDQConvPRelu": False,
    "RemoveQDQConvRelu": False,
    "RemoveQDQConvLeakyRelu": False,
    "Int32Bias": False,
    "DedicatedQDQPair": True,
    "QuantizeAllOpTypes": True,
}
_MIXED_BF16: Options = {
    "ActivationSymmetric": True,
    "QuantizeBias": False,
    "DedicateDQNode": True,
    "CalibDataSize": 1,
    "AutoMixprecision": {"DualQuantNodes": True},
}
_MIXED_INT16: Options = {
    **OUTLIERS,
    **FORCE,
    "Int32Bias": False,
    "Int16Bias": False,
    "WeightSymmetric": True,
    "ActivationSymmetric": False,
}
CPU: Options = {"Target": "ort_x64", "StoreFloat16": True}
_NBITS: Options = {"GroupSize": 128, "Symmetric": True, "Bits": 4, "AccuracyLevel": 1}


@dataclass(frozen=True)
class Row:
    """A configuration of the older form.

    Attributes:
        fields: Fields of QuantizationConfig that differ from its defaults.
        options: Extra options.
        target: Spec of the layers that mixed precision chooses.
    """

    fields: Options
    options: Options
    target: type[QTensorConfig] | None = None

    def make(self, kind: Callable[..., T]) -> T:
        """A new config of the class `kind`: QuantizationConfig."""
        options = deepcopy(dict(self.options))
        if self.target is not None:
            layer = QLayerConfig(input_tensors=self.target(), weight=self.target(), bias=self.target())
            options["AutoMixprecision"] = {"TargetLayerConfig": layer, **options.get("AutoMixprecision", {})}
        return kind(**self.fields, extra_options=options)

    def learned(self, finetune: Options) -> Row:
        """The row with learned rounding."""
        fields = {**self.fields, "include_fast_ft": True}
        return replace(self, fields=fields, options={**self.options, "FastFinetune": finetune})


@dataclass(frozen=True)
class QRow:
    """A `*_QCONFIG`.

    Attributes:
        activation, weight: Specs.
        options: Extra options.
        algorithm: Learned rounding.
    """

    activation: type[QTensorConfig]
    weight: type[QTensorConfig]
    options: Options
    algorithm: type[AlgoConfig] | None = None

    def make(self, kind: Callable[..., T]) -> T:
        """A new config of the class `kind`: QConfig."""
        layer = QLayerConfig(input_tensors=self.activation(), weight=self.weight())
        algorithms = [self.algorithm()] if self.algorithm else []
        return kind(layer, algo_config=algorithms, extra_options=deepcopy(dict(self.options)))


def _onnx(activation: str, weight: str, options: Options, method: Enum = MIN_MAX, **fields: Any) -> Row:
    """A row in the types of ONNX Runtime."""
    types = {"activation_type": QuantType[activation], "weight_type": QuantType[weight]}
    return Row({"calibrate_method": method, "quant_format": QuantFormat.QDQ, **types, **fields}, options)


def _extended(activation: str, weight: str, options: Options, method: Enum = MIN_MAX, **fields: Any) -> Row:
    """A row in the extended types: Q/DQ of com.microsoft, or the extended operators."""
    types = {"activation_type": ExtendedQuantType[activation], "weight_type": ExtendedQuantType[weight]}
    return Row({"calibrate_method": method, "quant_format": ExtendedQuantFormat.QDQ, **types, **fields}, options)


def _bfp(name: str) -> Options:
    """The options of a block format with a shared exponent."""
    method, bits = BFP_FORMATS[name]
    attributes = {"bfp_method": method, "axis": 1, "bit_width": bits, "block_size": DTYPES[name].block}
    if name in MICRO_EXPONENT:
        attributes |= {"sub_block_size": 2, "sub_block_shift_bits": 1}
    return {"BFPAttributes": {**attributes, "rounding_mode": 2}}


def _mx(element: str) -> Options:
    """The options of an OCP MX format."""
    return {"MXAttributes": {"element_dtype": element, "axis": 1, "block_size": OCP_BLOCK, "rounding_mode": 2}}


def _mixed(row: Row, target: type[QTensorConfig]) -> Row:
    return replace(row, fields={**row.fields, "include_auto_mp": True}, target=target)


_LEGACY: dict[str, Row] = {
    "UINT8_DYNAMIC_QUANT": _onnx("QInt8", "QUInt8", {}, use_dynamic_quant=True),
    "XINT8": _onnx("QUInt8", "QInt8", SYMMETRIC, MIN_MSE, enable_npu_cnn=True),
    "VINT8": _onnx("QInt8", "QInt8", {"ActivationSymmetric": True, **VINT8}, MIN_MSE, optimize_model=False),
    "S8S8_AAWS": _onnx("QInt8", "QInt8", {**OUTLIERS, **FORCE}, PERCENTILE),
    "U8S8_AAWS": _onnx("QUInt8", "QInt8", FORCE, PERCENTILE),
    "U8U8_AAWA": _onnx("QUInt8", "QUInt8", ASYMMETRIC, PERCENTILE),
    "S16S8_ASWS": _extended("QInt16", "QInt8", SYMMETRIC, PERCENTILE),
    "U16S8_AAWS": _extended("QUInt16", "QInt8", FORCE, PERCENTILE),
    "A8W8": _extended("QInt8", "QInt8", {**SYMMETRIC, **ALIGNED}),
    "A16W8": _extended("QInt16", "QInt8", {**SYMMETRIC, **ALIGNED, "AlignEltwiseQuantType": True}),
    "FP16": _extended("QFloat16", "QFloat16", FORCE),
    "BF16": _extended("QBFloat16", "QBFloat16", {"QuantizeAllOpTypes": True, **FORCE}),
    "BFP16": _extended("QBFP", "QBFP", _bfp("onnx_bfp16")),
    "MX4": _extended("QBFP", "QBFP", _bfp("mx4")),
    "MX6": _extended("QBFP", "QBFP", _bfp("mx6")),
    "MX9": _extended("QBFP", "QBFP", _bfp("mx9")),
    "MXFP8E5M2": _extended("QMX", "QMX", _mx("fp8_e5m2")),
    "MXFP8E4M3": _extended("QMX", "QMX", _mx("fp8_e4m3")),
    "MXFP6E3M2": _extended("QMX", "QMX", _mx("fp6_e3m2")),
    "MXFP6E2M3": _extended("QMX", "QMX", _mx("fp6_e2m3")),
    "MXFP4E2M1": _extended("QMX", "QMX", _mx("fp4_e2m1")),
    "MXINT8": _extended("QMX", "QMX", _mx("int8")),
    "S16S16_MIXED_S8S8": _mixed(_extended("QInt16", "QInt16", _MIXED_INT16, PERCENTILE), Int8Spec),
    "BF16_MIXED_BFP16": _mixed(_extended("QBFloat16", "QBFloat16", _MIXED_BF16), BFP16Spec),
    "BF16_MIXED_MXINT8": _mixed(_extended("QBFloat16", "QBFloat16", _MIXED_BF16), MXInt8Spec),
    "BF16_BFP16": _extended("QBFloat16", "QBFP", _bfp("onnx_bfp16")),
    "BF16_MXINT8": _extended("QBFloat16", "QMX", _mx("int8")),
    "MX9_INT8": _extended("QBFP", "QInt8", _bfp("mx9")),
    "INT8_CNN_DEFAULT": _onnx("QUInt8", "QInt8", FORCE),
    "INT8_TRANSFORMER_DEFAULT": _onnx("QUInt8", "QInt8", _MOVING_AVERAGE, **TRANSFORMER),
    "INT8_CNN_ACCURATE": _onnx("QUInt8", "QInt8", {**OUTLIERS, **FORCE}, PERCENTILE).learned(ADAROUND),
    "INT8_TRANSFORMER_ACCURATE": _onnx("QUInt8", "QInt8", OUTLIERS, PERCENTILE, **TRANSFORMER).learned(ADAROUND),
    "INT16_CNN_DEFAULT": _extended("QUInt16", "QInt16", FORCE),
    "INT16_TRANSFORMER_DEFAULT": _extended("QUInt16", "QInt16", _MOVING_AVERAGE, **TRANSFORMER),
    "INT16_CNN_ACCURATE": _extended("QUInt16", "QInt16", {**OUTLIERS, **FORCE}, PERCENTILE).learned(ADAROUND),
    "INT16_TRANSFORMER_ACCURATE": _extended("QUInt16", "QInt16", OUTLIERS, PERCENTILE, **TRANSFORMER).learned(ADAROUND),
    "INT8_CPU": _onnx("QUInt8", "QInt8", CPU, PERCENTILE, per_channel=True),
    "INT8_OPENVINO": _onnx(
        "QInt8", "QInt8", {"Target": "openvino", "ActivationSymmetric": True}, PERCENTILE, per_channel=True
    ),
    "INT8_CPU_WEIGHTS": _onnx("QUInt8", "QInt8", {**CPU, "WeightsOnly": True}, per_channel=True),
    # Unsigned: int8 beside uint8 saturates on processors without VNNI.
    "INT8_CPU_DYNAMIC": _onnx("QUInt8", "QUInt8", CPU, per_channel=True, use_dynamic_quant=True),
    "MATMUL_NBITS": _onnx("QInt8", "QInt8", {"UseMatMulNBits": True, "MatMulNBitsParams": _NBITS}),
}
_WITH_ADAROUND = ("XINT8", "S8S8_AAWS", "U8S8_AAWS", "S16S8_ASWS", "U16S8_AAWS", "A8W8", "A16W8")
"""Rows that have an `_ADAROUND`."""
_WITH_ADAQUANT = (
    *_WITH_ADAROUND,
    *("FP16", "BF16", "BFP16", "MX4", "MX6", "MX9"),
    *("MXFP8E5M2", "MXFP8E4M3", "MXFP6E3M2", "MXFP6E2M3", "MXFP4E2M1", "MXINT8"),
    *("BF16_MIXED_BFP16", "BF16_MIXED_MXINT8"),
)
"""Rows that have an `_ADAQUANT`."""

ROWS: Registry[Row] = Registry("configuration")
for _name, _row in _LEGACY.items():
    ROWS.register(_name, _row)
    if _name in _WITH_ADAROUND:
        ROWS.register(f"{_name}_ADAROUND", _row.learned(ADAROUND))
    if _name in _WITH_ADAQUANT:
        ROWS.register(f"{_name}_ADAQUANT", _row.learned(ADAQUANT))

QROWS: dict[str, QRow] = {
    "XINT8_QCONFIG": QRow(XInt8Spec, XInt8Spec, FORCE),
    "XINT8_ADAROUND_QCONFIG": QRow(XInt8Spec, XInt8Spec, FORCE, AdaRoundConfig),
    "XINT8_ADAQUANT_QCONFIG": QRow(XInt8Spec, XInt8Spec, FORCE, AdaQuantConfig),
    "A8W8_QCONFIG": QRow(Int8Spec, Int8Spec, {**FORCE, **ALIGNED}),
    "A8W8_ADAROUND_QCONFIG": QRow(Int8Spec, Int8Spec, {**FORCE, **ALIGNED}, AdaRoundConfig),
    "A8W8_ADAQUANT_QCONFIG": QRow(Int8Spec, Int8Spec, {**FORCE, **ALIGNED}, AdaQuantConfig),
    "A16W8_QCONFIG": QRow(Int16Spec, Int8Spec, A16W8),
    "A16W8_ADAROUND_QCONFIG": QRow(Int16Spec, Int8Spec, A16W8, AdaRoundConfig),
    "A16W8_ADAQUANT_QCONFIG": QRow(Int16Spec, Int8Spec, A16W8, AdaQuantConfig),
    "VINT8_QCONFIG": QRow(XInt8Spec, XInt8Spec, {"OptimizeModel": False, "EnableNPUCnn": False, **VINT8}),
    "BF16_QCONFIG": QRow(BFloat16Spec, BFloat16Spec, FORCE),
    "BFP16_QCONFIG": QRow(BFP16Spec, BFP16Spec, {}),
}


def make_legacy(name: str, kind: Callable[..., T]) -> T:
    """A new config of the class `kind`, QuantizationConfig, for a name such as "A8W8" or "A8W8_CONFIG".

    Raises:
        ConfigError: there is none; names the nearest.
    """
    return ROWS[name.removesuffix("_CONFIG") if isinstance(name, str) else name].make(kind)
