"""The documented enums of the ONNX flow, beside ONNX Runtime's own (re-exported), and what they normalise to."""

from __future__ import annotations

from enum import Enum

from onnx import TensorProto
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantizationMode, QuantType

from quark.core.dtypes import DTYPES
from quark.errors import ConfigError, did_you_mean
from quark.onnx_ops.element_types import code_type

__all__ = [
    "CalibMethod", "CalibrationMethod", "ExtendedCalibrationMethod", "ExtendedQuantFormat", "ExtendedQuantType",
    "Int16Method", "LayerWiseMethod", "PowerOfTwoMethod", "QuantFormat", "QuantGranularity", "QuantType",
    "QuantizationMode", "ScaleType", "VitisQuantFormat", "VitisQuantType",
]  # fmt: skip


class CalibMethod(Enum):
    """How the range of a tensor is found."""

    MinMax = 0
    MinMSE = 1
    Percentile = 2
    Entropy = 3
    LayerwisePercentile = 4
    Distribution = 5


class ScaleType(Enum):
    """Which numbers a scale may be."""

    Float32 = 0
    PowerOf2 = 1
    Int16 = 2


class QuantGranularity(Enum):
    """Which values share a scale."""

    Tensor = 0
    Channel = 1
    Group = 2


class PowerOfTwoMethod(Enum):
    """Calibration of power-of-two scales (legacy configs)."""

    NonOverflow = 0
    MinMSE = 1


class Int16Method(Enum):
    """Calibration of int16 scales (legacy configs)."""

    MinMax = 0


class LayerWiseMethod(Enum):
    """Calibration with a percentile of each tensor's own (legacy configs)."""

    LayerWisePercentile = 0


class ExtendedCalibrationMethod(Enum):
    """Calibration of weights beyond ONNX Runtime's methods."""

    MinMSE = 0


class ExtendedQuantFormat(Enum):
    """QDQ in the com.microsoft domain, for types beyond 8 bits."""

    QOperator = 0
    QDQ = 1


class VitisQuantFormat(Enum):
    """The older name of ExtendedQuantFormat; every member means its QDQ."""

    QDQ = 2
    FixNeuron = 3
    BFPFixNeuron = 4
    MXFixNeuron = 5


class _ElementType(Enum):
    """The base of the two element-type enums."""

    @property
    def tensor_type(self) -> int:
        """The TensorProto type; UNDEFINED for the block formats, which have none."""
        name = self.name.removeprefix("Q")
        kind = code_type(DTYPES[name.lower()]) if name.lower() in DTYPES else name
        return int(dict(TensorProto.DataType.items()).get(kind, TensorProto.UNDEFINED))

    @classmethod
    def from_string(cls, text: str) -> _ElementType:
        """The member of this name. Raises ConfigError with the nearest names."""
        if text in cls.__members__:
            return cls[text]
        raise ConfigError(f"Unknown {cls.__name__} {text!r}. {did_you_mean(text, cls.__members__)}")

    def __str__(self) -> str:
        return self.name


class ExtendedQuantType(_ElementType):
    """Element types; QBFP and QMX are families whose member BFPAttributes or MXAttributes names."""

    QInt8 = 1
    QUInt8 = 2
    QInt16 = 3
    QUInt16 = 4
    QInt32 = 5
    QUInt32 = 6
    QFloat16 = 7
    QBFloat16 = 8
    QBFP = 9
    QMX = 10
    QFLOAT8E4M3FN = 17


class VitisQuantType(_ElementType):
    """The older name of ExtendedQuantType."""

    QInt8 = 1
    QUInt8 = 2
    QInt16 = 3
    QUInt16 = 4
    QInt32 = 5
    QUInt32 = 6
    QFloat16 = 7
    QBFloat16 = 8
    QBFP = 9
    QMX = 10
    QFLOAT8E4M3FN = 17


def is_extended(quant_format: Enum) -> bool:
    """Return True where a format means com.microsoft Q/DQ. Every VitisQuantFormat does."""
    return isinstance(quant_format, (ExtendedQuantFormat, VitisQuantFormat))


def element_type(quant_type: Enum, quant_format: Enum) -> ExtendedQuantType:
    """The ExtendedQuantType of any of the three enums: by name, or what the older format says.

    Raises:
        ConfigError: ONNX Runtime has a type that has no counterpart.
    """
    family = {VitisQuantFormat.BFPFixNeuron: "QBFP", VitisQuantFormat.MXFixNeuron: "QMX"}
    name = family.get(quant_format, quant_type.name) if isinstance(quant_format, VitisQuantFormat) else quant_type.name
    if name not in ExtendedQuantType.__members__:
        known = ", ".join(ExtendedQuantType.__members__)
        raise ConfigError(f"There is no quantization to {quant_type}. Possible: {known}.")
    return ExtendedQuantType[name]
