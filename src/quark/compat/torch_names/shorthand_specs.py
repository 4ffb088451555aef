"""The documented shorthand specs: `Int8PerTensorSpec().to_quantization_spec()` is a QTensorConfig.

A family holds the arguments; a class is a row of the table below: a family, a dtype, and the defaults that differ.
Argument names, order and defaults are the documented system's, uneven as they are: code gives them by position.
"""

# ruff: noqa: D101, N801 - the names are the documented ones, and say what the classes are

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import dataclass_transform

from quark.base.checked import checked_dataclass
from quark.errors import ConfigError, did_you_mean
from quark.torch.config.tensor import observer_classes as obs
from quark.torch.config.tensor.enums import Dtype, RoundType, ScaleType, TQTThresholdInitMeth
from quark.torch.config.tensor.tensor_config import QTensorConfig

__all__ = [
    "AmdFP4Spec", "BFP16Spec", "Bfloat16Spec", "DataTypeSpec", "FP4PerGroupSpec", "FP6E2M3PerGroupSpec",
    "FP6E3M2PerGroupSpec", "FP8E4M3PerChannelSpec", "FP8E4M3PerGroupSpec", "FP8E4M3PerTensorSpec",
    "FP8E5M2PerChannelSpec", "FP8E5M2PerGroupSpec", "FP8E5M2PerTensorSpec", "FP8E5M3PerTensorSpec", "Float16Spec",
    "Int2PerGroupSpec", "Int3PerChannelSpec", "Int3PerGroupSpec", "Int4PerChannelSpec", "Int4PerGroupSpec",
    "Int4PerTensorSpec", "Int8PerChannelSpec", "Int8PerGroupSpec", "Int8PerTensorSpec", "MX6Spec", "MX9Spec",
    "OCP_MXFP4DiffsSpec", "OCP_MXFP4Spec", "OCP_MXFP6E2M3Spec", "OCP_MXFP6E3M2Spec", "OCP_MXFP8E4M3Spec",
    "OCP_MXFP8E5M2Spec", "OCP_MXINT8Spec", "OCP_MXSpec", "ProgressiveSpec", "QATSpec", "ScaleQuantSpec", "TQTSpec",
    "TwoStageSpec", "Uint4PerChannelSpec", "Uint4PerGroupSpec", "Uint4PerTensorSpec", "Uint8PerChannelSpec",
    "Uint8PerGroupSpec", "Uint8PerTensorSpec",
]  # fmt: skip

Fixed = Mapping[str, Any]

OBSERVER_METHODS: dict[str, type[obs.ObserverBase]] = {
    "min_max": obs.PerTensorMinMaxObserver,
    "histogram": obs.PerTensorHistogramObserver,
    "histogrampro": obs.PerTensorHistogramObserverPro,
    "MSE": obs.PerTensorMSEObserver,
    "percentile": obs.PerTensorPercentileObserver,
    "entropy": obs.PerTensorEntropyObserver,
    "layerwise_percentile": obs.PerTensorLayerwisePercentileObserver,
    "distribution": obs.PerTensorDistributionObserver,
    "moving_average": obs.PerTensorMovingAverageMinMaxObserver,
}


@dataclass_transform()
@checked_dataclass
class DataTypeSpec:
    """Base of the shorthand specs."""

    dtype: ClassVar[Dtype]
    fixed: ClassVar[Fixed] = {}

    def __init_subclass__(cls, dtype: Dtype | None = None, **defaults: Any) -> None:
        """Make a checked dataclass of a family or of a row of the table.

        Args:
            dtype: Of a row: its element type; a family has none.
            **defaults: Fields of the family whose default is another one here.
        """
        super().__init_subclass__()
        if dtype is not None:
            cls.dtype = dtype
            cls.__doc__ = cls.__doc__ or f"{dtype.name}: {cls.__mro__[1].__doc__}"
        # A dataclass takes a default from a class attribute that is annotated in the class itself.
        types = {field.name: field.type for field in dataclasses.fields(cls) if field.name in defaults}
        cls.__annotations__ = {**cls.__annotations__, **types}
        for name, value in defaults.items():
            setattr(cls, name, value)
        checked_dataclass(cls)

    def to_quantization_spec(self) -> QTensorConfig:
        """The full config."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if "observer_method" in values:
            method = values.pop("observer_method")
            if method not in OBSERVER_METHODS:
                raise ConfigError(f"unknown observer_method {method!r}. {did_you_mean(str(method), OBSERVER_METHODS)}")
            values["observer_cls"] = OBSERVER_METHODS[method]
        if "block_size" in values:
            values["group_size"] = values.pop("block_size")
        if self.dtype is Dtype.mx:
            del values["is_dynamic"]
        return QTensorConfig(self.dtype, **{**self.fixed, **values})

    @classmethod
    def _accept(cls, values: dict[str, Any]) -> None:
        """A guide gives `ScaleType.float` where the class takes its name."""
        values.update({name: value.name for name, value in values.items() if isinstance(value, (ScaleType, RoundType))})

    def _check(self) -> None:
        if not hasattr(self, "dtype"):
            return
        try:
            self.to_quantization_spec()
        except ConfigError as error:
            raise ConfigError(f"{type(self).__name__}: {error}") from None


class _PerTensor(DataTypeSpec):
    """One scale for the tensor."""

    fixed: ClassVar[Fixed] = {"qscheme": "per_tensor"}
    observer_method: str | None = "min_max"
    symmetric: bool | None = True
    scale_type: str | None = "float"
    round_method: str | None = "half_even"
    is_dynamic: bool | None = False


class _FP8PerTensor(DataTypeSpec):
    """One scale for the tensor, which is always symmetric and rounded half to even."""

    fixed: ClassVar[Fixed] = {"qscheme": "per_tensor", "symmetric": True, "round_method": "half_even"}
    observer_method: str | None = "min_max"
    scale_type: str | None = None
    is_dynamic: bool | None = False


class _PerChannel(DataTypeSpec):
    """A scale for each index of the axis `ch_axis`."""

    fixed: ClassVar[Fixed] = {"qscheme": "per_channel", "observer_cls": obs.PerChannelMinMaxObserver}
    ch_axis: int
    symmetric: bool | None = True
    scale_type: str | None = "float"
    round_method: str | None = "half_even"
    is_dynamic: bool | None = False


_GROUP: Fixed = {"qscheme": "per_group", "observer_cls": obs.PerGroupMinMaxObserver}


class _PerGroup(DataTypeSpec):
    """A scale for each `group_size` values along the axis `ch_axis`."""

    fixed: ClassVar[Fixed] = _GROUP
    ch_axis: int
    group_size: int
    symmetric: bool | None = True
    scale_type: str | None = "float"
    round_method: str | None = "half_even"
    is_dynamic: bool | None = False


class _PerGroup4Bit(DataTypeSpec):
    """A scale for each `group_size` values along the axis `ch_axis`; `is_dynamic` comes earlier."""

    fixed: ClassVar[Fixed] = _GROUP
    ch_axis: int
    group_size: int
    symmetric: bool = True
    is_dynamic: bool | None = False
    scale_type: str | None = "float"
    round_method: str | None = "half_even"


_BLOCK: Fixed = {
    "qscheme": "per_group",
    "observer_cls": obs.PerBlockMXObserver,
    "round_method": "half_even",
    "scale_type": "float",
}


class _FloatGroup(DataTypeSpec):
    """A scale for each `group_size` values along the axis `ch_axis`, itself of the type `scale_format`."""

    fixed: ClassVar[Fixed] = _BLOCK
    ch_axis: int = -1
    group_size: int | None = None
    scale_format: str | None = "float32"
    scale_calculation_mode: str | None = None
    is_dynamic: bool | None = True


class OCP_MXSpec(DataTypeSpec):
    """OCP MX: groups of 32 along the axis `ch_axis` under an E8M0 scale."""

    fixed: ClassVar[Fixed] = {**_BLOCK, "group_size": 32, "scale_format": "e8m0"}
    ch_axis: int = -1
    is_dynamic: bool | None = True
    scale_calculation_mode: str | None = "even"


class _MicroExponent(DataTypeSpec):
    """Blocks of `block_size` values under a shared exponent, with a shift of one bit for each pair."""

    ch_axis: int
    block_size: int
    scale_calculation_mode: str | None = "even"


class _Cast(DataTypeSpec):
    """A cast, without a scale."""

    fixed: ClassVar[Fixed] = {"observer_cls": obs.PlaceholderObserver}


# A table: a class a line.
# fmt: off
class Uint4PerTensorSpec(_PerTensor, dtype=Dtype.uint4, symmetric=False): ...
class Int4PerTensorSpec(_PerTensor, dtype=Dtype.int4): ...
class Uint8PerTensorSpec(_PerTensor, dtype=Dtype.uint8, symmetric=False): ...
class Int8PerTensorSpec(_PerTensor, dtype=Dtype.int8): ...
class FP8E5M2PerTensorSpec(_PerTensor, dtype=Dtype.fp8_e5m2): ...
class FP8E4M3PerTensorSpec(_FP8PerTensor, dtype=Dtype.fp8_e4m3): ...
class FP8E5M3PerTensorSpec(_FP8PerTensor, dtype=Dtype.fp8_e5m3): ...

class Int3PerChannelSpec(_PerChannel, dtype=Dtype.int3, symmetric=False): ...
class Int4PerChannelSpec(_PerChannel, dtype=Dtype.int4): ...
class Uint8PerChannelSpec(_PerChannel, dtype=Dtype.uint8): ...
class Int8PerChannelSpec(_PerChannel, dtype=Dtype.int8, symmetric=False): ...
class FP8E4M3PerChannelSpec(_PerChannel, dtype=Dtype.fp8_e4m3): ...
class FP8E5M2PerChannelSpec(_PerChannel, dtype=Dtype.fp8_e5m2): ...

class Int2PerGroupSpec(_PerGroup, dtype=Dtype.int2): ...
class Int3PerGroupSpec(_PerGroup, dtype=Dtype.int3): ...
class Uint4PerGroupSpec(_PerGroup4Bit, dtype=Dtype.uint4, symmetric=False): ...
class Int4PerGroupSpec(_PerGroup4Bit, dtype=Dtype.int4): ...
class Uint8PerGroupSpec(_PerGroup, dtype=Dtype.uint8, symmetric=False): ...
class Int8PerGroupSpec(_PerGroup, dtype=Dtype.int8): ...
class FP6E2M3PerGroupSpec(_FloatGroup, dtype=Dtype.fp6_e2m3): ...
class FP6E3M2PerGroupSpec(_FloatGroup, dtype=Dtype.fp6_e3m2): ...
class FP8E4M3PerGroupSpec(_FloatGroup, dtype=Dtype.fp8_e4m3): ...
class FP8E5M2PerGroupSpec(_FloatGroup, dtype=Dtype.fp8_e5m2): ...

class OCP_MXFP4Spec(OCP_MXSpec, dtype=Dtype.fp4): ...
class OCP_MXFP6E2M3Spec(OCP_MXSpec, dtype=Dtype.fp6_e2m3): ...
class OCP_MXFP6E3M2Spec(OCP_MXSpec, dtype=Dtype.fp6_e3m2): ...
class OCP_MXFP8E4M3Spec(OCP_MXSpec, dtype=Dtype.fp8_e4m3): ...
class OCP_MXFP8E5M2Spec(OCP_MXSpec, dtype=Dtype.fp8_e5m2): ...
class MX6Spec(_MicroExponent, dtype=Dtype.mx6): ...
class MX9Spec(_MicroExponent, dtype=Dtype.mx9): ...
class Float16Spec(_Cast, dtype=Dtype.float16): ...
class Bfloat16Spec(_Cast, dtype=Dtype.bfloat16): ...
# fmt: on


class Uint4PerChannelSpec(_PerChannel, dtype=Dtype.uint4, symmetric=False, is_dynamic=None):
    """uint4: a scale for each index of the axis `ch_axis`. `is_dynamic` must be given."""

    zero_point_type: str | None = "int32"


class FP4PerGroupSpec(_FloatGroup, dtype=Dtype.fp4):
    """fp4: a scale for each `group_size` values along the axis `ch_axis`, itself of the type `scale_format`."""

    scale_type: str | None = "float"


class AmdFP4Spec(DataTypeSpec, dtype=Dtype.fp4):
    """FP4 groups of 16 or 32 under an E5M3 scale."""

    fixed: ClassVar[Fixed] = {**_BLOCK, "scale_type": "float8_e5m3", "scale_format": "e5m3"}
    ch_axis: int
    group_size: int
    is_dynamic: bool = True

    def to_quantization_spec(self) -> QTensorConfig:
        if self.group_size not in (16, 32):
            raise ConfigError(f"group_size must be 16 or 32, got {self.group_size}.")
        return DataTypeSpec.to_quantization_spec(self)


class OCP_MXINT8Spec(OCP_MXSpec, dtype=Dtype.mx):
    """`is_dynamic` is accepted; the format itself decides: weights static, activations dynamic."""

    fixed: ClassVar[Fixed] = {"group_size": 32, "mx_element_dtype": "int8"}


class OCP_MXFP4DiffsSpec(OCP_MXSpec, dtype=Dtype.fp4, is_dynamic=False):
    """MXFP4 whose exponent is chosen by error: the ceil exponent or the one below."""

    fixed: ClassVar[Fixed] = {**OCP_MXSpec.fixed, "observer_cls": obs.PerBlockMXDiffsObserver}


class BFP16Spec(DataTypeSpec, dtype=Dtype.bfp16):
    """Blocks of 8 with 8-bit mantissas."""

    fixed: ClassVar[Fixed] = {"group_size": 8}
    ch_axis: int
    scale_calculation_mode: str | None = "even"


@checked_dataclass
class TwoStageSpec:
    """Base of two configs in sequence; each a spec or a QTensorConfig."""

    first_stage: DataTypeSpec | QTensorConfig
    second_stage: DataTypeSpec | QTensorConfig
    scales: ClassVar[bool] = False

    def to_quantization_spec(self) -> list[QTensorConfig]:
        """Both stages."""
        stages = (self.first_stage, self.second_stage)
        first, second = (s if isinstance(s, QTensorConfig) else s.to_quantization_spec() for s in stages)
        return [first, dataclasses.replace(second, is_scale_quant=self.scales)]


class ProgressiveSpec(TwoStageSpec):
    """The second stage quantizes the codes of the first (int4 of FP8)."""


class ScaleQuantSpec(TwoStageSpec):
    """The second stage quantizes the scales of the first (NVFP4)."""

    scales = True


@checked_dataclass
class QATSpec:
    """Base of the values of `qat_spec`."""


@checked_dataclass
class TQTSpec(QATSpec):
    """Trained quantization thresholds."""

    threshold_init_meth: TQTThresholdInitMeth | None = None
