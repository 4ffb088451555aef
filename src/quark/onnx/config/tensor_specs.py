"""Tensor specs: QTensorConfig, the `*Spec` classes, which are its rows of defaults, and the data types they name."""

# ruff: noqa: E701 - a table of classes, one a line

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, get_type_hints

from quark.base.checked import checked, known_keys, member
from quark.core.dtypes import DTYPES
from quark.core.names.registry import Registry
from quark.errors import ConfigError
from quark.onnx.config.enums import CalibMethod, ExtendedQuantType, QuantGranularity, QuantType, ScaleType
from quark.onnx_ops.operators import BFP_FORMATS

__all__ = [
    "BFP16", "MX4", "MX6", "MX9", "MXFP4E2M1", "MXFP6E2M3", "MXFP6E3M2", "MXFP8E4M3", "MXFP8E5M2", "BFP16Spec",
    "BFloat16", "BFloat16Spec", "DataType", "Float16", "Float16Spec", "Int4", "Int4Spec", "Int8", "Int8Spec", "Int16",
    "Int16Spec", "Int32", "Int32Spec", "MX4Spec", "MX6Spec", "MX9Spec", "MXFP4E2M1Spec", "MXFP6E2M3Spec",
    "MXFP6E3M2Spec", "MXFP8E4M3Spec", "MXFP8E5M2Spec", "MXInt8", "MXInt8Spec", "QTensorConfig", "UInt4", "UInt4Spec",
    "UInt8", "UInt8Spec", "UInt16", "UInt16Spec", "UInt32", "UInt32Spec", "XInt8Spec",
]  # fmt: skip


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

    @property
    def bitwidth(self) -> int:
        """Bits of a value; of the block formats with a shared exponent, `bit_width` of BFPAttributes."""
        return BFP_FORMATS[self.core][1] if self.core in BFP_FORMATS else DTYPES[self.core].bits

    @property
    def map_onnx_format(self) -> Enum:
        """The element type of the flat QuantizationConfig that is this one, or the family that it belongs to."""
        if self.core in BFP_FORMATS:
            return ExtendedQuantType.QBFP
        if self.block:
            return ExtendedQuantType.QMX
        small = self.name in ("Int8", "UInt8", "Int4", "UInt4")
        return QuantType[f"Q{self.name}"] if small else ExtendedQuantType.from_string(f"Q{self.name}")


DATA_TYPES: Registry[DataType] = Registry("data type")
OCP_BLOCK = 32
"""Block length of the MX formats whose elements are types of their own."""


def _data_type(name: str, core: str = "") -> DataType:
    """Register a data type; its row of core/dtypes.py has the same name in lower case unless it is given."""
    row = DTYPES[core or name.lower()]
    block = OCP_BLOCK if name.startswith("MXFP") else row.block
    return DATA_TYPES.register(name, DataType(name, row.name, block))


Int4 = _data_type("Int4")
UInt4 = _data_type("UInt4")
Int8 = _data_type("Int8")
UInt8 = _data_type("UInt8")
Int16 = _data_type("Int16")
UInt16 = _data_type("UInt16")
Int32 = _data_type("Int32")
UInt32 = _data_type("UInt32")
Float16 = _data_type("Float16")
BFloat16 = _data_type("BFloat16")
BFP16 = _data_type("BFP16", "onnx_bfp16")
MX4 = _data_type("MX4")
MX6 = _data_type("MX6")
MX9 = _data_type("MX9")
MXFP4E2M1 = _data_type("MXFP4E2M1", "fp4_e2m1")
MXFP6E3M2 = _data_type("MXFP6E3M2", "fp6_e3m2")
MXFP6E2M3 = _data_type("MXFP6E2M3", "fp6_e2m3")
MXFP8E5M2 = _data_type("MXFP8E5M2", "fp8_e5m2")
MXFP8E4M3 = _data_type("MXFP8E4M3", "fp8_e4m3")
MXInt8 = _data_type("MXInt8", "onnx_mxint8")
FLOAT8 = DataType("FLOAT8E4M3FN", "fp8_e4m3")
"""Of ONNX Runtime's QuantType: it has no spec, and no name in a QTensorConfig."""


def parse_data_type(name: str) -> DataType | None:
    """The data type of this name, or None."""
    return next((kind for kind in DATA_TYPES.values() if kind.name == name), None)


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

    def __repr__(self) -> str:
        """One line: type, granularity, and what is not the default."""
        parts = [self.data_type.name, f"per {self.quant_granularity.name.lower()}"]
        parts += [] if self.symmetric else ["asymmetric"]
        parts += [] if self.scale_type is ScaleType.Float32 else [f"{self.scale_type.name} scale"]
        return ", ".join([*parts, self.calibration_method.name])

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
    """Base of the documented classes: QTensorConfig with other defaults, a row of the table below."""

    def __init_subclass__(
        cls,
        data_type: DataType,
        method: CalibMethod = CalibMethod.MinMax,
        symmetric: bool = True,
        scale_type: ScaleType = ScaleType.Float32,
    ) -> None:
        """Make a checked dataclass of the row; its arguments are the defaults of the fields."""
        super().__init_subclass__()
        defaults = {
            "symmetric": symmetric,
            "scale_type": scale_type,
            "calibration_method": method,
            "data_type": data_type,
        }
        # A dataclass takes a default from a class attribute that is annotated in the class itself.
        types = get_type_hints(QTensorConfig)
        cls.__annotations__ = {name: types[name] for name in defaults}
        for name, value in defaults.items():
            setattr(cls, name, value)
        checked(dataclass(eq=False)(cls))


PERCENTILE = CalibMethod.Percentile


# A table: a class a line.
# fmt: off
class Int4Spec(_Spec, data_type=Int4): """Symmetric int4, float scale, min-max: for weights."""
class UInt4Spec(_Spec, data_type=UInt4, symmetric=False): """Asymmetric uint4, float scale, min-max: for weights."""
class Int8Spec(_Spec, data_type=Int8, method=PERCENTILE): """Symmetric int8, float scale, percentile."""
class UInt8Spec(_Spec, data_type=UInt8, method=PERCENTILE, symmetric=False): """Asymmetric uint8, percentile."""
class Int16Spec(_Spec, data_type=Int16, method=PERCENTILE): """Symmetric int16, float scale, percentile."""
class UInt16Spec(_Spec, data_type=UInt16, method=PERCENTILE, symmetric=False): """Asymmetric uint16, percentile."""
class Int32Spec(_Spec, data_type=Int32, method=PERCENTILE): """Symmetric int32, float scale, percentile."""
class UInt32Spec(_Spec, data_type=UInt32, method=PERCENTILE, symmetric=False): """Asymmetric uint32, percentile."""
class Float16Spec(_Spec, data_type=Float16): """IEEE half precision."""
class BFloat16Spec(_Spec, data_type=BFloat16): """bfloat16: the exponent of float32 with 7 mantissa bits."""
class BFP16Spec(_Spec, data_type=BFP16): """Blocks of 8 values that share an exponent, 8-bit mantissas."""
class MX4Spec(_Spec, data_type=MX4): """Blocks of 16 with micro-exponents for pairs, 4 bits a value."""
class MX6Spec(_Spec, data_type=MX6): """Blocks of 16 with micro-exponents for pairs, 6 bits a value."""
class MX9Spec(_Spec, data_type=MX9): """Blocks of 16 with micro-exponents for pairs, 9 bits a value."""
class MXFP4E2M1Spec(_Spec, data_type=MXFP4E2M1): """OCP MX blocks of 32, FP4 E2M1 elements."""
class MXFP6E3M2Spec(_Spec, data_type=MXFP6E3M2): """OCP MX blocks of 32, FP6 E3M2 elements."""
class MXFP6E2M3Spec(_Spec, data_type=MXFP6E2M3): """OCP MX blocks of 32, FP6 E2M3 elements."""
class MXFP8E5M2Spec(_Spec, data_type=MXFP8E5M2): """OCP MX blocks of 32, FP8 E5M2 elements."""
class MXFP8E4M3Spec(_Spec, data_type=MXFP8E4M3): """OCP MX blocks of 32, FP8 E4M3 elements."""
class MXInt8Spec(_Spec, data_type=MXInt8): """OCP MX blocks of 32, int8 elements."""
# fmt: on


class XInt8Spec(Int8Spec, data_type=Int8, method=CalibMethod.MinMSE, scale_type=ScaleType.PowerOf2):
    """Symmetric int8 with a power-of-two scale of least squared error: the NPU's."""


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
