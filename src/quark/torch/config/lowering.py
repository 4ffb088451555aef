"""Lowering: the documented configs to core specs and back. Pure functions; nothing after them reads a config.

    per_tensor                       PerTensor()
    per_channel(ch_axis)             PerChannel(ch_axis); PerToken() for live activations of linear layers
    per_group(ch_axis, group_size)   PerGroup(ch_axis, group_size); padded under E8M0 scales
    per_block(block_size)            PerBlock(block_size), the last ones padded
    mx mx4 mx6 mx9 bfp16             PerGroup(ch_axis, group_size, pad=True)

`config_of_tensor` and `config_of_layer` are the inverse, so that core/schemes.py is the only list of schemes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quark.core.blocks.block_types import BlockType
from quark.core.dtypes import DTYPES
from quark.core.dtypes import Dtype as Row
from quark.core.granularity import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quark.core.rounding import RoundType
from quark.core.spec import FLOAT_SCALES, LayerSpec, Learning, ScaleRule, ScaleType, TensorSpec
from quark.errors import ConfigError
from quark.torch.config.config import QLayerConfig, TensorConfigs
from quark.torch.config.tensor.enums import Dtype, QSchemeType, TQTThresholdInitMeth, ZeroPointType
from quark.torch.config.tensor.observer_classes import core_spec, observer_class
from quark.torch.config.tensor.rules import SCALE_FORMATS, kind_of
from quark.torch.config.tensor.tensor_config import QTensorConfig

_LIVE_OBSERVERS = ("min_max", "block", "placeholder", "pof2_min_max")
"""Statistics that a dynamic scale can honour: it is made from the minimum and maximum of the live tensor."""


def lower_tensor(config: TensorConfigs, *, per_token: bool = False, live: bool = False) -> TensorSpec | None:
    """The spec of a tensor config, or of a list of two.

    Args:
        config: What the user wrote; None stays None.
        per_token: The tensor is a live activation of a linear layer: dynamic per_channel along any axis but the
            last then means one scale for each token, which is what runtimes compute.
        live: The tensor is an activation: the block formats, which have no `is_dynamic`, are then dynamic.

    Raises:
        ConfigError: a combination that would not do what it says.
    """
    if config is None:
        return None
    stages = config if isinstance(config, list) else [config]
    spec = _lower_one(stages[0], per_token, live or per_token)
    if len(stages) == 1:
        return spec
    second = _lower_one(stages[1], per_token, live or per_token)
    if stages[1].is_scale_quant:
        return replace(spec, scale_spec=second)
    return replace(spec, code_spec=second)


@core_spec.register(QTensorConfig)
@core_spec.register(list)
def _observed_spec(config: TensorConfigs) -> TensorSpec | None:
    """Return the spec of an observer that is made with a config."""
    return lower_tensor(config)


def lower_layer(config: QLayerConfig | None, *, per_token: bool = False) -> LayerSpec:
    """The spec of a layer config; None leaves the layer in float.

    A weight is its own calibration data, so a dynamic weight is quantized once, as a static one.
    """
    if config is None:
        return LayerSpec()
    return LayerSpec(
        weight=lower_tensor(_static(config.weight)),
        bias=lower_tensor(_static(config.bias)),
        input=lower_tensor(config.input_tensors, per_token=per_token, live=True),
        output=lower_tensor(config.output_tensors, per_token=per_token, live=True),
    )


def _static(config: TensorConfigs) -> TensorConfigs:
    if isinstance(config, list):
        return [replace(stage, is_dynamic=False) if stage.is_dynamic else stage for stage in config]
    return replace(config, is_dynamic=False) if config is not None and config.is_dynamic else config


def _lower_one(config: QTensorConfig, per_token: bool, live: bool) -> TensorSpec:
    kind = kind_of(config.dtype)
    dtype = _element(config)
    if kind == "cast":
        return TensorSpec(dtype, observer="placeholder")
    observer = config.observer_cls.observer if config.observer_cls else "block"
    if kind == "block":
        return _lower_block(config, dtype, observer, live)
    dynamic = bool(config.is_dynamic)
    if dynamic and observer not in _LIVE_OBSERVERS:
        raise ConfigError(
            f"QTensorConfig.observer_cls: a dynamic scale is the minimum and maximum of the live tensor, so "
            f"{config.observer_cls.__name__ if config.observer_cls else observer} would have no effect. "
            "Use a MinMax observer, or is_dynamic=False."
        )
    scale_type = _scale_type(config)
    learning = config.observer_cls.learning if config.observer_cls else None
    if learning is not None:
        # A scale that is trained is float32, whatever the dtype of the model.
        scale_type = ScaleType.float32 if scale_type is ScaleType.float else scale_type
        observer = _first_threshold(config, live) if learning is Learning.tqt else observer
    return TensorSpec(
        dtype,
        _granularity(config, scale_type, per_token),
        symmetric=config.symmetric is not False,
        dynamic=dynamic,
        scale_type=ScaleType.pof2 if observer.startswith("pof2") else scale_type,
        scale_rule=ScaleRule(config.scale_calculation_mode or "even"),
        # Codes are rounded to the nearest where `floor` is asked for, as in the documented system: it errs far less.
        rounding=RoundType.half_even if config.round_method in (None, RoundType.floor) else config.round_method,
        float_zero_point=config.zero_point_type is ZeroPointType.float32,
        observer=observer,
        learning=learning,
    )


def _scale_type(config: QTensorConfig) -> ScaleType:
    return SCALE_FORMATS[config.scale_format] if config.scale_format else config.scale_type or ScaleType.float


def _lower_block(config: QTensorConfig, dtype: Row, observer: str, live: bool) -> TensorSpec:
    e8m0 = config.dtype is Dtype.mx
    return TensorSpec(
        dtype,
        PerGroup(_checked(config.ch_axis), _checked(config.group_size), pad=not isinstance(dtype, BlockType)),
        dynamic=live or bool(config.is_dynamic),
        scale_type=ScaleType.float8_e8m0fnu if e8m0 else ScaleType.float32,
        scale_rule=ScaleRule(config.scale_calculation_mode or "even") if e8m0 else ScaleRule.even,
        observer=observer,
    )


def _first_threshold(config: QTensorConfig, live: bool) -> str:
    """The statistic with which TQT starts; where nothing is said, those of the paper."""
    method = getattr(config.qat_spec, "threshold_init_meth", None)
    if method is None:
        method = TQTThresholdInitMeth._KL_J if live else TQTThresholdInitMeth._3SD
    return "kl_j" if method is TQTThresholdInitMeth._KL_J else "three_sigma"


def _element(config: QTensorConfig) -> Row:
    """The row of the element type; Dtype.mx is its element."""
    if config.dtype is not Dtype.mx:
        return config.dtype.row
    element = _checked(config.mx_element_dtype)
    return DTYPES["mxint8"] if element is Dtype.int8 else element.row


def _checked(value: Any) -> Any:
    """A field that the door has made sure of."""
    assert value is not None
    return value


def _granularity(config: QTensorConfig, scale_type: ScaleType, per_token: bool) -> Granularity:
    axis = config.ch_axis
    if config.qscheme is QSchemeType.per_channel:
        token = per_token and config.is_dynamic and axis != -1
        return PerToken() if token else PerChannel(_checked(axis))
    if config.qscheme is QSchemeType.per_group:
        # What a runtime finds in live tokens as it goes needs no whole groups either.
        live = bool(config.is_dynamic) and config.dtype.row.is_float and config.dtype.row.bits == 8
        pad = live or scale_type is ScaleType.float8_e8m0fnu
        return PerGroup(_checked(axis), _checked(config.group_size), pad=pad)
    if config.qscheme is QSchemeType.per_block:
        # Zeros change no range but that of a float zero point, which is not widened to 0.
        return PerBlock(_checked(config.block_size), pad=config.zero_point_type is not ZeroPointType.float32)
    return PerTensor()


def config_of_tensor(spec: TensorSpec | None) -> TensorConfigs:
    """The config that lowers to `spec`, as the checkpoint format writes it."""
    if spec is None:
        return None
    first = _config_of_stage(spec)
    if spec.scale_spec is not None:
        return [first, replace(_config_of_stage(spec.scale_spec), is_scale_quant=True)]
    return [first, _config_of_stage(spec.code_spec)] if spec.code_spec is not None else first


def config_of_layer(spec: LayerSpec) -> QLayerConfig:
    """The layer config that lowers to `spec`."""
    return QLayerConfig(
        input_tensors=config_of_tensor(spec.input),
        output_tensors=config_of_tensor(spec.output),
        weight=config_of_tensor(spec.weight),
        bias=config_of_tensor(spec.bias),
    )


def _config_of_stage(spec: TensorSpec) -> QTensorConfig:
    dtype = Dtype.from_row(spec.dtype)
    observer = observer_class(spec.observer, spec.granularity)
    split = spec.granularity
    if spec.is_cast:
        return QTensorConfig(dtype, observer)
    if spec.dtype.is_block:
        assert isinstance(split, PerGroup)
        return QTensorConfig(
            dtype,
            None if spec.observer == "block" else observer,
            ch_axis=split.axis,
            group_size=split.size,
            scale_calculation_mode=spec.scale_rule.value,
            mx_element_dtype=Dtype.int8 if dtype is Dtype.mx else None,
        )
    # Runtimes look for True beside FP8 groups under float scales, and for None beside the others.
    plain = spec.dtype.bits == 8 and spec.scale_type in FLOAT_SCALES and spec.scale_spec is None
    grouped_float = spec.dtype.is_float and isinstance(split, PerGroup) and not plain
    return QTensorConfig(
        dtype,
        observer,
        spec.dynamic,
        **_granularity_fields(split),
        **_scale_fields(spec),
        symmetric=None if grouped_float else spec.symmetric,
        round_method=spec.rounding,
        zero_point_type=ZeroPointType.float32 if spec.float_zero_point else ZeroPointType.int32,
    )


def _granularity_fields(split: Granularity) -> dict[str, Any]:
    if isinstance(split, PerToken):
        return {"qscheme": QSchemeType.per_channel, "ch_axis": 1}
    if isinstance(split, PerChannel):
        return {"qscheme": QSchemeType.per_channel, "ch_axis": split.axis}
    if isinstance(split, PerGroup):
        return {"qscheme": QSchemeType.per_group, "ch_axis": split.axis, "group_size": split.size}
    if isinstance(split, PerBlock):
        return {"qscheme": QSchemeType.per_block, "block_size": split.size}
    return {"qscheme": QSchemeType.per_tensor}


def _scale_fields(spec: TensorSpec) -> dict[str, Any]:
    """`scale_type`, `scale_format` and `scale_calculation_mode`, as existing checkpoints spell them."""
    kind = spec.scale_type
    if kind is ScaleType.float8_e8m0fnu:
        mode = spec.scale_rule.value
        return {"scale_type": ScaleType.float, "scale_format": "e8m0", "scale_calculation_mode": mode}
    if kind is ScaleType.float8_e4m3:
        return {"scale_type": ScaleType.float, "scale_format": "e4m3"}
    if kind is ScaleType.float8_e5m3:
        return {"scale_type": kind, "scale_format": "e5m3"}
    grouped = spec.dtype.is_float and isinstance(spec.granularity, PerGroup)
    return {"scale_type": kind, "scale_format": "float32" if grouped and kind is ScaleType.float32 else None}
