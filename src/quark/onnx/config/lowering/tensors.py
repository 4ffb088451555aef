"""Lowering of one tensor: QTensorConfig and the options that concern it, to a core TensorSpec. Pure functions.

integers         MinMax     Percentile   Entropy   MinMSE         weights: MinMSE, else MinMax
float scales     min_max    percentile   entropy   mse            also LayerwisePercentile, Distribution
power of two     pof2_non_overflow                 pof2_min_mse      or a mode of MinMSE, as for weights

floats           a cast                            nothing is calibrated
scaled bfloat16  min_max    percentile             scale = amax / 2: the values fill [-2, 2], where bfloat16 is dense
blocks           PerGroup(1, size, pad=True)       weights static, activations live
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quark.base.log import logger
from quark.core.dtypes import DTYPES
from quark.core.granularity import PerChannel, PerGroup, PerTensor
from quark.core.rounding import RoundType
from quark.core.spec import ScaleRule, TensorSpec
from quark.core.spec import ScaleType as CoreScale
from quark.errors import ConfigError, NotSupportedError, did_you_mean
from quark.onnx.config.enums import CalibMethod, ExtendedQuantType, QuantGranularity, ScaleType
from quark.onnx.config.extra_options import value_of
from quark.onnx.config.tensor_specs import DATA_TYPES, FLOAT8, DataType, QTensorConfig
from quark.onnx_ops.operators import BFP_FORMATS, MX_ELEMENTS, ROUNDING_MODES

FLOATS = ("float16", "bfloat16")
_SCALED_BFLOAT16 = replace(DTYPES["bfloat16"], name="bfloat16_scaled", min=-2.0, max=2.0)
_FLOAT_SCALE = {
    CalibMethod.MinMax: "min_max",
    CalibMethod.MinMSE: "mse",
    CalibMethod.Percentile: "percentile",
    CalibMethod.Entropy: "entropy",
    CalibMethod.LayerwisePercentile: "layerwise_percentile",
    CalibMethod.Distribution: "distribution",
}
_RANGE_SYMMETRY = (CalibMethod.MinMax, CalibMethod.Percentile, CalibMethod.LayerwisePercentile)
"""The methods of float scales whose range CalibTensorRangeSymmetric changes, there and in ONNX Runtime."""
POWER_OF_TWO = {CalibMethod.MinMax: "pof2_non_overflow", CalibMethod.MinMSE: "pof2_min_mse"}
_POWER_OF_TWO_MODES = {"All": "pof2_min_mse", "MostCommon": "pof2_most_common", "Percentile": "pof2_mse_percentile"}
FLOAT_MODES = {"All": "mse", "Percentile": "mse_percentile", "HistCenter": "mse_centers"}
"""Mode of MinMSE -> observer: of activations under powers of two, and of weights under float scales."""
SCALES = {ScaleType.Float32: CoreScale.float32, ScaleType.PowerOf2: CoreScale.pof2, ScaleType.Int16: CoreScale.int16}
_BY_CORE = {data_type.core: data_type for data_type in DATA_TYPES.values()}
_BFP_TYPES = {form: _BY_CORE[name] for name, form in BFP_FORMATS.items()}
"""(bfp_method, bit_width) of BFPAttributes -> data type."""
_MX_TYPES = {element: _BY_CORE[name] for name, element in MX_ELEMENTS.items()} | {"fp4": _BY_CORE["fp4_e2m1"]}
"""element_dtype of MXAttributes -> data type."""
_BLOCK_KEYS = {
    "BFPAttributes": (
        "bfp_method",
        "axis",
        "bit_width",
        "block_size",
        "sub_block_size",
        "sub_block_shift_bits",
        "rounding_mode",
        "convert_to_bfloat_before_bfp",
    ),
    "MXAttributes": ("element_dtype", "axis", "block_size", "rounding_mode"),
}
_ROUNDINGS = {mode: rounding for rounding, mode in ROUNDING_MODES.items()}


def is_integer(config: QTensorConfig) -> bool:
    """Return True where the element type is a plain integer."""
    return config.data_type.core.startswith(("int", "uint"))


def lower_tensor(config: QTensorConfig, options: Mapping[str, Any], *, weight: bool) -> TensorSpec:
    """The spec of a tensor.

    Args:
        config: What the user wrote.
        options: Extra options, checked.
        weight: A constant, whose range comes from its own values, or an activation.

    Raises:
        ConfigError: a combination that has no meaning.
        NotSupportedError: one that this version does not have.
    """
    if config.data_type.core in FLOATS:
        return _lower_float(config, options, weight)
    if config.data_type.block:
        return _lower_block(config, options, weight)
    if DTYPES[config.data_type.core].is_float and not (weight or value_of(options, "WeightsOnly")):
        raise NotSupportedError(
            f"Activations in {config.data_type}: ONNX Runtime fuses their Q/DQ into operators that have no such type, "
            "and loads no such file. Possible: WeightsOnly=True, or QInt8 and QInt16 activations."
        )
    observer = _weight_observer(config, options) if weight else _activation_observer(config, options)
    return TensorSpec(
        DTYPES[config.data_type.core],
        _granularity(config, options, weight, observer),
        symmetric=is_symmetric(config, options, weight=weight),
        scale_type=SCALES[_scale_type(config, options)],
        observer=observer,
    )


def is_symmetric(config: QTensorConfig, options: Mapping[str, Any], *, weight: bool = False) -> bool:
    """Return True where the zero point of a tensor is fixed: by the type, by the option, else by the spec."""
    if DTYPES[config.data_type.core].is_float:
        return True
    symmetric: bool | None = value_of(options, "WeightSymmetric" if weight else "ActivationSymmetric")
    return config.symmetric if symmetric is None else symmetric


def _scale_type(config: QTensorConfig, options: Mapping[str, Any]) -> ScaleType:
    """Which numbers a scale may be: what the spec says, unless an option overrules it. Raises ConfigError."""
    if not value_of(options, "Int16Scale"):
        is_power = config.scale_type is ScaleType.PowerOf2 and value_of(options, "UsePowerOf2Scale")
        return ScaleType.Float32 if config.scale_type is ScaleType.PowerOf2 and not is_power else config.scale_type
    if config.scale_type is ScaleType.PowerOf2 and value_of(options, "UsePowerOf2Scale"):
        raise ConfigError("Int16Scale=True with scales that are powers of two. Possible: ScaleType.Float32, or one.")
    return ScaleType.Int16


def _lower_float(config: QTensorConfig, options: Mapping[str, Any], weight: bool) -> TensorSpec:
    """A cast, or bfloat16 under a scale."""
    option = "WeightScaled" if weight else "ActivationScaled"
    if not value_of(options, option):
        return TensorSpec(DTYPES[config.data_type.core], observer="placeholder")
    if config.data_type.core != "bfloat16":
        raise ConfigError(f"{option}=True is for BFloat16, got {config.data_type}.")
    observer = "min_max" if weight else _activation_observer(config, options)
    if observer not in ("min_max", "percentile", "moving_average"):
        raise NotSupportedError(f"{option}=True goes with CalibMethod.MinMax or Percentile, got {observer}.")
    return TensorSpec(_SCALED_BFLOAT16, observer=observer)


def _granularity(
    config: QTensorConfig, options: Mapping[str, Any], weight: bool, observer: str
) -> PerTensor | PerChannel | PerGroup:
    """The axes are those of a MatMul's weight; placement turns them to each op's own."""
    granularity = config.quant_granularity
    if not weight and config.data_type.core in ("int4", "uint4"):
        raise NotSupportedError(f"{config.data_type} is for weights: no runtime has 4-bit activations.")
    if granularity is QuantGranularity.Tensor:
        return PerTensor()
    if not weight:
        raise ConfigError(f"{granularity} is for weights: runtimes have one activation scale; possible: Tensor.")
    if observer.startswith("mse"):
        raise NotSupportedError(
            f"CalibMethod.MinMSE finds one range for a weight; with {granularity}, use CalibMethod.MinMax."
        )
    if granularity is QuantGranularity.Group:
        return PerGroup(0, group_size(value_of(options, "BlockSize"), "BlockSize"), pad=True)
    return PerChannel(0)


def group_size(size: int, name: str) -> int:
    """A block length that runtimes have. Raises ConfigError."""
    if size < 16 or size & (size - 1):
        raise ConfigError(f"{name}={size}: possible: 16, 32, 64, 128, 256 ...")
    return size


def _activation_observer(config: QTensorConfig, options: Mapping[str, Any]) -> str:
    method, scale = config.calibration_method, _scale_type(config, options)
    if config.scale_type is ScaleType.PowerOf2 and method not in POWER_OF_TWO:
        raise ConfigError(f"{method} does not go with {config.scale_type}; possible: MinMax, MinMSE.")
    if scale is ScaleType.PowerOf2:
        if value_of(options, "CalibTensorRangeSymmetric") not in (None, is_symmetric(config, options)):
            raise ConfigError(
                "CalibTensorRangeSymmetric: the range of a power-of-two scale is symmetric as its spec is."
            )
        if method is CalibMethod.MinMSE:
            return _mode(options, "MinMSEModePof2Scale", _POWER_OF_TWO_MODES)
        return POWER_OF_TWO[method]
    moving = method is CalibMethod.MinMax and value_of(options, "CalibMovingAverage")
    if method not in _RANGE_SYMMETRY and value_of(options, "CalibTensorRangeSymmetric") is not None:
        logger.warning(
            f"CalibTensorRangeSymmetric has no effect on {method}, whose range is its own. "
            f"It has one on {', '.join(map(str, _RANGE_SYMMETRY))}."
        )
    return "moving_average" if moving else _FLOAT_SCALE[method]


def _weight_observer(config: QTensorConfig, options: Mapping[str, Any]) -> str:
    given = value_of(options, "WeightCalibrateMethod")
    if given is not None and given.name not in ("MinMax", "MinMSE"):
        raise ConfigError(f"WeightCalibrateMethod={given}: possible: MinMax, MinMSE.")
    name = (given or config.calibration_method).name
    method = CalibMethod.MinMSE if name == "MinMSE" else CalibMethod.MinMax
    if _scale_type(config, options) is ScaleType.PowerOf2:
        return POWER_OF_TWO[method]
    if method is CalibMethod.MinMSE:
        return _mode(options, "MinMSEModeFloatScale", FLOAT_MODES)
    return _FLOAT_SCALE[method]


def _mode(options: Mapping[str, Any], name: str, modes: Mapping[str, str]) -> str:
    """The observer of a mode of MinMSE. Raises ConfigError for an unknown one."""
    mode = value_of(options, name)
    if mode not in modes:
        raise ConfigError(f"{name}={mode!r}. {did_you_mean(str(mode), modes)}")
    return modes[mode]


def _lower_block(config: QTensorConfig, options: Mapping[str, Any], weight: bool) -> TensorSpec:
    """The exponent of an OCP block is that of its largest magnitude (floor); the other formats have no scale type."""
    kind = config.data_type
    ocp = kind.core not in BFP_FORMATS
    attributes = _block_attributes(options, "MXAttributes" if ocp else "BFPAttributes")
    rounding = attributes.get("rounding_mode", 2)
    if rounding not in _ROUNDINGS:
        raise ConfigError(f"rounding_mode {rounding} of {kind}. Possible: 0, 1, 2.")
    return TensorSpec(
        DTYPES[kind.core],
        PerGroup(attributes.get("axis", 1), attributes.get("block_size", kind.block), pad=True),
        dynamic=not weight,
        scale_type=CoreScale.float8_e8m0fnu if ocp else CoreScale.float32,
        scale_rule=ScaleRule.floor if ocp else ScaleRule.even,
        # Float elements are rounded half to even in every mode, as the documented operator does.
        rounding=RoundType.half_even if DTYPES[kind.core].is_float else _ROUNDINGS[rounding],
        observer="block",
    )


def _block_attributes(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """BFPAttributes or MXAttributes. Raises ConfigError for an unknown entry."""
    attributes = dict(value_of(options, name))
    for key in attributes:
        if key not in _BLOCK_KEYS[name]:
            raise ConfigError(f"{name} has no entry {key!r}. {did_you_mean(str(key), _BLOCK_KEYS[name])}")
    for key, value in attributes.items():
        kind = str if key in ("bfp_method", "element_dtype") else int
        if not isinstance(value, kind):
            raise ConfigError(f"{name}.{key}: expected {kind.__name__}, got {value!r} ({type(value).__name__}).")
    if attributes.get("block_size", 1) < 1:
        raise ConfigError(f"{name}.block_size={attributes['block_size']}: possible: 1 and more.")
    if attributes.get("sub_block_size", 2) != 2 or attributes.get("sub_block_shift_bits", 1) != 1:
        raise NotSupportedError(
            f"{name}: the micro-exponent formats have pairs (sub_block_size 2) that shift by 1 bit."
        )
    if attributes.get("convert_to_bfloat_before_bfp"):
        raise NotSupportedError(f"{name}: convert_to_bfloat_before_bfp is not part of this version; possible: 0.")
    return attributes


def data_type_of(kind: ExtendedQuantType, options: Mapping[str, Any]) -> DataType:
    """The data type of a legacy element type; QBFP and QMX are named by the attributes.

    Raises:
        ConfigError: the attributes name no known format.
    """
    if kind is ExtendedQuantType.QBFP:
        given = _block_attributes(options, "BFPAttributes")
        key = (given.get("bfp_method", "to_bfp"), given.get("bit_width", 16))
        if key not in _BFP_TYPES:
            shown = ", ".join(f"{method} with {bits}" for method, bits in _BFP_TYPES)
            raise ConfigError(f"BFPAttributes: no format is {key[0]} with bit_width {key[1]}; possible: {shown}.")
        return _BFP_TYPES[key]
    if kind is ExtendedQuantType.QMX:
        element = _block_attributes(options, "MXAttributes").get("element_dtype", "int8")
        if element not in _MX_TYPES:
            raise ConfigError(f"MXAttributes.element_dtype: {element!r}. {did_you_mean(str(element), _MX_TYPES)}")
        return _MX_TYPES[element]
    if kind is ExtendedQuantType.QFLOAT8E4M3FN:
        return FLOAT8
    return DATA_TYPES[kind.name.removeprefix("Q")]
