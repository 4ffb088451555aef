"""The named configurations: one row each. `get_default_config("A8W8")` and the `*_QCONFIG` names make new objects.

Naming: activation type, weight type; A8W8 is int8 / int8. S signed, U unsigned; AAWS: activations asymmetric, weights
symmetric. `_ADAROUND` and `_ADAQUANT` add the learned rounding of that name.

The two generations differ where they have one name: A8W8 and A16W8 by name calibrate by MinMax, A8W8_QCONFIG and
A16W8_QCONFIG by percentile; XINT8 by name has uint8 activations (zero point 128), XINT8_QCONFIG int8.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from quark.core.registry import Registry
from quark.errors import did_you_mean
from quark.onnx.config import tensor_specs as specs
from quark.onnx.config.algo_configs import AdaQuantConfig, AdaRoundConfig, AlgoConfig
from quark.onnx.config.config import QConfig, QLayerConfig, QuantizationConfig
from quark.onnx.config.enums import (
    CalibrationMethod,
    ExtendedQuantFormat,
    ExtendedQuantType,
    PowerOfTwoMethod,
    QuantFormat,
    QuantType,
)

__all__ = ["get_default_config", "get_default_config_mapping"]


Options = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One legacy configuration: what differs from QuantizationConfig's defaults."""

    activation: str = "QInt8"
    weight: str = "QInt8"
    method: Enum = CalibrationMethod.MinMax
    extended: bool = False
    options: Options = field(default_factory=dict)
    fields: Options = field(default_factory=dict)
    target: type[specs.QTensorConfig] | None = None
    """Precision of the layers that mixed precision chooses."""

    def make(self) -> QuantizationConfig:
        """A new config."""
        options = deepcopy(dict(self.options))
        if self.target is not None:
            layer = QLayerConfig(input_tensors=self.target(), weight=self.target(), bias=self.target())
            options["AutoMixprecision"] = {"TargetLayerConfig": layer, **options.get("AutoMixprecision", {})}
        types = ExtendedQuantType if self.extended else QuantType
        return QuantizationConfig(
            calibrate_method=self.method,
            quant_format=ExtendedQuantFormat.QDQ if self.extended else QuantFormat.QDQ,
            activation_type=types[self.activation],
            weight_type=types[self.weight],
            **{**self.fields, "extra_options": options},
        )


_FORCE: Options = {"ForceQuantizeNoInputCheck": True}
_SYMMETRIC: Options = {"ActivationSymmetric": True, **_FORCE}
_A8W8: Options = {**_SYMMETRIC, "AlignSlice": False, "FoldRelu": True, "AlignConcat": True}
_OUTLIERS: Options = {"Percentile": 99.9999}
_PERCENTILE, _MIN_MSE = CalibrationMethod.Percentile, PowerOfTwoMethod.MinMSE
_ADAROUND: Options = {
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
_ADAQUANT: Options = {**_ADAROUND, "LearningRate": 1e-5, "OptimAlgorithm": "adaquant"}
_VINT8: Options = {
    "UseRandomData": True,
    "ConvertBNToConv": True,
    "ConvertSigmoidToHardSigmoid": False,
    "ConvertClipToRelu": True,
    "ConvertSplitToSlice": True,
    "SplitLargeKernelPool": False,
    "ReplaceClip6Relu": True,
    "ConvertReduceMeanToGlobalAvgPool": False,
    **dict.fromkeys(("RemoveQDQConvClip", "RemoveQDQConvPRelu", "RemoveQDQConvRelu", "RemoveQDQConvLeakyRelu"), False),
    "Int32Bias": False,
    "DedicatedQDQPair": True,
    "QuantizeAllOpTypes": True,
}
_MIXED: Options = {
    "ActivationSymmetric": True,
    "QuantizeBias": False,
    "DedicateDQNode": True,
    "CalibDataSize": 1,
    "AutoMixprecision": {"DualQuantNodes": True},
}


def _bfp(method: str, bits: int, block: int) -> Options:
    sub = {"sub_block_size": 2, "sub_block_shift_bits": 1} if method == "to_bfp_prime" else {}
    entries = {"bfp_method": method, "axis": 1, "bit_width": bits, "block_size": block, **sub, "rounding_mode": 2}
    return {"BFPAttributes": entries}


def _mx(element: str) -> Options:
    return {"MXAttributes": {"element_dtype": element, "axis": 1, "block_size": 32, "rounding_mode": 2}}


ROWS: Registry[Row] = Registry("configuration")


def _row(name: str, row: Row, *variants: str) -> None:
    ROWS.register(name, row)
    for variant in variants:
        tuned = {**row.options, "FastFinetune": _ADAROUND if variant == "ADAROUND" else _ADAQUANT}
        fields = {**row.fields, "include_fast_ft": True}
        ROWS.register(
            f"{name}_{variant}", Row(row.activation, row.weight, row.method, row.extended, tuned, fields, row.target)
        )


_BOTH = ("ADAROUND", "ADAQUANT")
_NPU_CNN: Options = {"enable_npu_cnn": True}
_TRANSFORMER: Options = {"enable_npu_transformer": True}
_AUTO_MP: Options = {"include_auto_mp": True}

_row("UINT8_DYNAMIC_QUANT", Row(weight="QUInt8", fields={"use_dynamic_quant": True}))
_row("XINT8", Row("QUInt8", "QInt8", _MIN_MSE, options=_SYMMETRIC, fields=_NPU_CNN), *_BOTH)
_vint8: Options = {"ActivationSymmetric": True, **_VINT8}
_row("VINT8", Row("QInt8", "QInt8", _MIN_MSE, options=_vint8, fields={"optimize_model": False}))
_row("S8S8_AAWS", Row("QInt8", "QInt8", _PERCENTILE, options={**_OUTLIERS, **_FORCE}), *_BOTH)
_row("U8S8_AAWS", Row("QUInt8", "QInt8", _PERCENTILE, options=_FORCE), *_BOTH)
_both_asymmetric: Options = {"ActivationSymmetric": False, "WeightSymmetric": False, **_FORCE}
_row("U8U8_AAWA", Row("QUInt8", "QUInt8", _PERCENTILE, options=_both_asymmetric))
_row("S16S8_ASWS", Row("QInt16", "QInt8", _PERCENTILE, True, _SYMMETRIC), *_BOTH)
_row("U16S8_AAWS", Row("QUInt16", "QInt8", _PERCENTILE, True, _FORCE), *_BOTH)
_row("A8W8", Row(extended=True, options=_A8W8), *_BOTH)
_row("A16W8", Row("QInt16", extended=True, options={**_A8W8, "AlignEltwiseQuantType": True}), *_BOTH)
_row("FP16", Row("QFloat16", "QFloat16", extended=True, options=_FORCE), "ADAQUANT")
_all_ops: Options = {"QuantizeAllOpTypes": True, **_FORCE}
_row("BF16", Row("QBFloat16", "QBFloat16", extended=True, options=_all_ops), "ADAQUANT")
_row("BFP16", Row("QBFP", "QBFP", extended=True, options=_bfp("to_bfp", 16, 8)), "ADAQUANT")
for _name, _bits in (("MX4", 11), ("MX6", 13), ("MX9", 16)):
    _row(_name, Row("QBFP", "QBFP", extended=True, options=_bfp("to_bfp_prime", _bits, 16)), "ADAQUANT")
for _name, _element in (
    ("MXFP8E5M2", "fp8_e5m2"),
    ("MXFP8E4M3", "fp8_e4m3"),
    ("MXFP6E3M2", "fp6_e3m2"),
    ("MXFP6E2M3", "fp6_e2m3"),
    ("MXFP4E2M1", "fp4_e2m1"),
    ("MXINT8", "int8"),
):
    _row(_name, Row("QMX", "QMX", extended=True, options=_mx(_element)), "ADAQUANT")
_s16: Options = {**_OUTLIERS, **_FORCE, "Int32Bias": False, "Int16Bias": False}
_s16 = {**_s16, "WeightSymmetric": True, "ActivationSymmetric": False}
_row("S16S16_MIXED_S8S8", Row("QInt16", "QInt16", _PERCENTILE, True, _s16, _AUTO_MP, specs.Int8Spec))
for _name, _target in (("BFP16", specs.BFP16Spec), ("MXINT8", specs.MXInt8Spec)):
    _mixed = Row("QBFloat16", "QBFloat16", extended=True, options=_MIXED, fields=_AUTO_MP, target=_target)
    _row(f"BF16_MIXED_{_name}", _mixed, "ADAQUANT")
_row("BF16_BFP16", Row("QBFloat16", "QBFP", extended=True, options=_bfp("to_bfp", 16, 8)))
_row("BF16_MXINT8", Row("QBFloat16", "QMX", extended=True, options=_mx("int8")))
_row("MX9_INT8", Row("QBFP", "QInt8", extended=True, options=_bfp("to_bfp_prime", 16, 16)))
_accurate: Options = {**_OUTLIERS, "FastFinetune": _ADAROUND}
for _name, _activation, _weight, _wide in (("INT8", "QUInt8", "QInt8", False), ("INT16", "QUInt16", "QInt16", True)):
    _row(f"{_name}_CNN_DEFAULT", Row(_activation, _weight, extended=_wide, options=_FORCE))
    _moving: Options = {"CalibMovingAverage": True}
    _row(
        f"{_name}_TRANSFORMER_DEFAULT", Row(_activation, _weight, extended=_wide, options=_moving, fields=_TRANSFORMER)
    )
    _cnn = Row(_activation, _weight, _PERCENTILE, _wide, {**_accurate, **_FORCE}, {"include_fast_ft": True})
    _row(f"{_name}_CNN_ACCURATE", _cnn)
    _fields: Options = {**_TRANSFORMER, "include_fast_ft": True}
    _row(f"{_name}_TRANSFORMER_ACCURATE", Row(_activation, _weight, _PERCENTILE, _wide, _accurate, _fields))
_nbits: Options = {"GroupSize": 128, "Symmetric": True, "Bits": 4, "AccuracyLevel": 1}
_row("MATMUL_NBITS", Row(options={"UseMatMulNBits": True, "MatMulNBitsParams": _nbits}))


@dataclass(frozen=True)
class QRow:
    """One `*_QCONFIG`."""

    activation: type[specs.QTensorConfig]
    weight: type[specs.QTensorConfig]
    options: Options = field(default_factory=dict)
    algorithm: type[AlgoConfig] | None = None

    def make(self) -> QConfig:
        """A new config."""
        layer = QLayerConfig(input_tensors=self.activation(), weight=self.weight())
        algorithms = [self.algorithm()] if self.algorithm else []
        return QConfig(layer, algo_config=algorithms, extra_options=dict(self.options))


_a8w8 = {name: value for name, value in _A8W8.items() if name != "ActivationSymmetric"}
QROWS: dict[str, QRow] = {}
for _name, _qrow in {
    "XINT8": QRow(specs.XInt8Spec, specs.XInt8Spec, _FORCE),
    "A8W8": QRow(specs.Int8Spec, specs.Int8Spec, _a8w8),
    "A16W8": QRow(specs.Int16Spec, specs.Int8Spec, {**_a8w8, "AlignEltwiseQuantType": True}),
}.items():
    QROWS[f"{_name}_QCONFIG"] = _qrow
    for _algorithm in (AdaRoundConfig, AdaQuantConfig):
        _tuned = QRow(_qrow.activation, _qrow.weight, _qrow.options, _algorithm)
        QROWS[f"{_name}_{_algorithm.name.upper()}_QCONFIG"] = _tuned
_vint8 = {"OptimizeModel": False, "EnableNPUCnn": False, **_VINT8}
QROWS["VINT8_QCONFIG"] = QRow(specs.XInt8Spec, specs.XInt8Spec, _vint8)
QROWS["BF16_QCONFIG"] = QRow(specs.BFloat16Spec, specs.BFloat16Spec, _FORCE)
QROWS["BFP16_QCONFIG"] = QRow(specs.BFP16Spec, specs.BFP16Spec)


def get_default_config(config_name: str) -> QuantizationConfig:
    """A new QuantizationConfig of this name, "A8W8" or "A8W8_CONFIG".

    Raises:
        ConfigError: there is none; names the nearest.
    """
    known = config_name.removesuffix("_CONFIG") if isinstance(config_name, str) else config_name
    return ROWS[known].make()


def get_default_config_mapping() -> dict[str, QuantizationConfig]:
    """All named configurations, new."""
    return {name: row.make() for name, row in ROWS.items()}


def __getattr__(name: str) -> Any:
    """A new object for `<NAME>_QCONFIG`, `<NAME>_CONFIG` and `DefaultConfigMapping`."""
    if name in QROWS:
        return QROWS[name].make()
    if name.removesuffix("_CONFIG") != name and name.removesuffix("_CONFIG") in ROWS:
        return get_default_config(name.removesuffix("_CONFIG"))
    if name == "DefaultConfigMapping":
        return get_default_config_mapping()
    hint = "" if name.startswith("_") else " " + did_you_mean(name, [*QROWS, *(f"{row}_CONFIG" for row in ROWS)])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
