"""Tensor specs: QTensorConfig, the `*Spec` classes that are its rows of defaults, and the data types they name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, TypeVar

from quark.checked import checked, known_keys, member
from quark.core.registry import Registry
from quark.errors import ConfigError
from quark.onnx.config.enums import CalibMethod, QuantGranularity, ScaleType

__all__ = [
    "BFP16",
    "MX4",
    "MX6",
    "MX9",
    "MXFP4E2M1",
    "MXFP6E2M3",
    "MXFP6E3M2",
    "MXFP8E4M3",
    "MXFP8E5M2",
    "BFP16Spec",
    "BFloat16",
    "BFloat16Spec",
    "DataType",
    "Float16",
    "Float16Spec",
    "Int4",
    "Int4Spec",
    "Int8",
    "Int8Spec",
    "Int16",
    "Int16Spec",
    "Int32",
    "Int32Spec",
    "MX4Spec",
    "MX6Spec",
    "MX9Spec",
    "MXFP4E2M1Spec",
    "MXFP6E2M3Spec",
    "MXFP6E3M2Spec",
    "MXFP8E4M3Spec",
    "MXFP8E5M2Spec",
    "MXInt8",
    "MXInt8Spec",
    "QTensorConfig",
    "UInt4",
    "UInt4Spec",
    "UInt8",
    "UInt8Spec",
    "UInt16",
    "UInt16Spec",
    "UInt32",
    "UInt32Spec",
    "XInt8Spec",
]


Q_ = TypeVar("Q_", bound="QTensorConfig")


@dataclass(frozen=True)
class DataType:
    """An element type of `config.data_type`.

    Attributes:
        name: The documented name.
        core: Its row in core/dtypes.py.
        block: Values that share an exponent, 0 where the type has none.
    """

    name: str
    core: str
    block: int = 0

    def __call__(self) -> DataType:
        """Itself: code that says `Int8()` works as code that says `Int8`."""
        return self

    def __str__(self) -> str:
        return self.name


DATA_TYPES: Registry[DataType] = Registry("data type")
for _name, _core, _block in [
    ("Int4", "int4", 0),
    ("UInt4", "uint4", 0),
    ("Int8", "int8", 0),
    ("UInt8", "uint8", 0),
    ("Int16", "int16", 0),
    ("UInt16", "uint16", 0),
    ("Int32", "int32", 0),
    ("UInt32", "uint32", 0),
    ("Float16", "float16", 0),
    ("BFloat16", "bfloat16", 0),
    ("BFP16", "bfp16", 8),
    ("MX4", "mx4", 16),
    ("MX6", "mx6", 16),
    ("MX9", "mx9", 16),
    ("MXFP4E2M1", "fp4_e2m1", 32),
    ("MXFP6E3M2", "fp6_e3m2", 32),
    ("MXFP6E2M3", "fp6_e2m3", 32),
    ("MXFP8E5M2", "fp8_e5m2", 32),
    ("MXFP8E4M3", "fp8_e4m3", 32),
    ("MXInt8", "mxint8", 32),
]:
    DATA_TYPES.register(_name, DataType(_name, _core, _block))


def parse_data_type(name: str) -> DataType | None:
    """The data type of this name, or None."""
    return next((kind for kind in DATA_TYPES.values() if kind.name == name), None)


Int4, UInt4 = DATA_TYPES["Int4"], DATA_TYPES["UInt4"]
Int8, UInt8 = DATA_TYPES["Int8"], DATA_TYPES["UInt8"]
Int16, UInt16 = DATA_TYPES["Int16"], DATA_TYPES["UInt16"]
Int32, UInt32 = DATA_TYPES["Int32"], DATA_TYPES["UInt32"]
Float16, BFloat16, BFP16 = DATA_TYPES["Float16"], DATA_TYPES["BFloat16"], DATA_TYPES["BFP16"]
MX4, MX6, MX9 = DATA_TYPES["MX4"], DATA_TYPES["MX6"], DATA_TYPES["MX9"]
MXFP4E2M1, MXInt8 = DATA_TYPES["MXFP4E2M1"], DATA_TYPES["MXInt8"]
MXFP6E3M2, MXFP6E2M3 = DATA_TYPES["MXFP6E3M2"], DATA_TYPES["MXFP6E2M3"]
MXFP8E5M2, MXFP8E4M3 = DATA_TYPES["MXFP8E5M2"], DATA_TYPES["MXFP8E4M3"]


@checked
@dataclass(eq=False)
class QTensorConfig:
    """How one tensor is quantized. The setters, and plain assignment, check what they are given.

    Attributes:
        symmetric: Zero point fixed.
        scale_type: Any float, a power of two, or M / 2^N.
        calibration_method: How the range is found.
        quant_granularity: One scale for the tensor or for each channel.
        data_type: Element type.

    Raises:
        ConfigError: a field is unknown or of the wrong type.
    """

    symmetric: bool = True
    scale_type: ScaleType = ScaleType.Float32
    calibration_method: CalibMethod = CalibMethod.MinMax
    quant_granularity: QuantGranularity = QuantGranularity.Tensor
    data_type: DataType = Int8

    @classmethod
    def _accept(cls, values: dict[str, Any]) -> None:
        if isinstance(values.get("data_type"), str):
            values["data_type"] = DATA_TYPES[values["data_type"]]
        method = values.get("calibration_method")
        if isinstance(method, Enum) and not isinstance(method, CalibMethod):
            values["calibration_method"] = member(CalibMethod, method.name, f"{cls.__name__}.calibration_method")

    def set_symmetric(self, symmetric: bool) -> None:
        """Change `symmetric`."""
        self.symmetric = symmetric

    def set_scale_type(self, scale_type: ScaleType) -> None:
        """Change `scale_type`."""
        self.scale_type = scale_type

    def set_calibration_method(self, calibration_method: CalibMethod) -> None:
        """Change `calibration_method`."""
        self.calibration_method = calibration_method

    def set_quant_granularity(self, quant_granularity: QuantGranularity) -> None:
        """Change `quant_granularity`."""
        self.quant_granularity = quant_granularity

    def set_data_type(self, data_type: DataType) -> None:
        """Change `data_type`."""
        self.data_type = data_type

    def to_dict(self) -> dict[str, Any]:
        """The five fields, enums as "ScaleType.Float32", the data type by name."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value if isinstance(value, bool) else str(value) for name, value in fields.items()}

    @classmethod
    def from_dict(cls: type[Q_], data: Mapping[str, Any]) -> Q_:
        """Read what `to_dict` wrote; enums with or without the name of their class."""
        values: dict[str, Any] = known_keys(data, cls)
        for name, value in values.items():
            values[name] = value.rsplit(".", 1)[-1] if isinstance(value, str) else value
        return cls(**values)


class _Spec(QTensorConfig):
    """A row of defaults: the class variables below."""

    row: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def _gather(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = [field.name for field in dataclasses.fields(cls)]
        given = {*names[: len(args)], *kwargs}
        return args, {**{name: value for name, value in cls.row.items() if name not in given}, **kwargs}


def _row(data_type: DataType, method: str = "Percentile", symmetric: bool = True, scale: str = "Float32") -> Any:
    return {
        "symmetric": symmetric,
        "scale_type": ScaleType[scale],
        "calibration_method": CalibMethod[method],
        "data_type": data_type,
    }


class Int4Spec(_Spec):
    """Symmetric int4, float scale, min-max: for weights."""

    row = _row(Int4, "MinMax")


class UInt4Spec(_Spec):
    """Asymmetric uint4, float scale, min-max: for weights."""

    row = _row(UInt4, "MinMax", symmetric=False)


class Int8Spec(_Spec):
    """Symmetric int8, float scale, percentile."""

    row = _row(Int8)


class UInt8Spec(_Spec):
    """Asymmetric uint8, float scale, percentile."""

    row = _row(UInt8, symmetric=False)


class XInt8Spec(Int8Spec):
    """Symmetric int8 with a power-of-two scale of least squared error: the NPU's."""

    row = _row(Int8, "MinMSE", scale="PowerOf2")


class Int16Spec(_Spec):
    """Symmetric int16, float scale, percentile."""

    row = _row(Int16)


class UInt16Spec(_Spec):
    """Asymmetric uint16, float scale, percentile."""

    row = _row(UInt16, symmetric=False)


class Int32Spec(_Spec):
    """Symmetric int32, float scale, percentile."""

    row = _row(Int32)


class UInt32Spec(_Spec):
    """Asymmetric uint32, float scale, percentile."""

    row = _row(UInt32, symmetric=False)


class Float16Spec(_Spec):
    """IEEE half precision."""

    row = _row(Float16, "MinMax")


class BFloat16Spec(_Spec):
    """bfloat16: the exponent of float32 with 7 mantissa bits."""

    row = _row(BFloat16, "MinMax")


class BFP16Spec(_Spec):
    """Blocks of 8 values that share an exponent, 8-bit mantissas."""

    row = _row(BFP16, "MinMax")


class MX4Spec(_Spec):
    """Blocks of 16 with micro-exponents for pairs, 4 bits a value."""

    row = _row(MX4, "MinMax")


class MX6Spec(_Spec):
    """Blocks of 16 with micro-exponents for pairs, 6 bits a value."""

    row = _row(MX6, "MinMax")


class MX9Spec(_Spec):
    """Blocks of 16 with micro-exponents for pairs, 9 bits a value."""

    row = _row(MX9, "MinMax")


class MXFP4E2M1Spec(_Spec):
    """OCP MX blocks of 32, FP4 E2M1 elements."""

    row = _row(MXFP4E2M1, "MinMax")


class MXFP6E3M2Spec(_Spec):
    """OCP MX blocks of 32, FP6 E3M2 elements."""

    row = _row(MXFP6E3M2, "MinMax")


class MXFP6E2M3Spec(_Spec):
    """OCP MX blocks of 32, FP6 E2M3 elements."""

    row = _row(MXFP6E2M3, "MinMax")


class MXFP8E5M2Spec(_Spec):
    """OCP MX blocks of 32, FP8 E5M2 elements."""

    row = _row(MXFP8E5M2, "MinMax")


class MXFP8E4M3Spec(_Spec):
    """OCP MX blocks of 32, FP8 E4M3 elements."""

    row = _row(MXFP8E4M3, "MinMax")


class MXInt8Spec(_Spec):
    """OCP MX blocks of 32, int8 elements."""

    row = _row(MXInt8, "MinMax")


def spec_from_dict(data: Mapping[str, Any] | QTensorConfig | None) -> QTensorConfig | None:
    """A tensor config from its dict; None and configs stay what they are.

    Raises:
        ConfigError: neither of these.
    """
    if data is None or isinstance(data, QTensorConfig):
        return data
    if not isinstance(data, Mapping):
        raise ConfigError(f"A tensor config is a dict of QTensorConfig's fields, got {data!r}.")
    return QTensorConfig.from_dict(data)
