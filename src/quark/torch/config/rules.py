"""Which fields of a QTensorConfig and a QLayerConfig fit together, as tables."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any

from quark.core.rounding import RoundType
from quark.core.scale_types import ScaleRule, ScaleType
from quark.core.spec import Learning
from quark.errors import ConfigError, did_you_mean
from quark.torch.config.enums import Dtype, QSchemeType, ZeroPointType
from quark.torch.config.observer_classes import OBSERVER_CLASSES

if TYPE_CHECKING:
    from quark.torch.config.config import QLayerConfig, QTensorConfig

MX_ELEMENTS = (Dtype.int8, Dtype.fp8_e4m3, Dtype.fp8_e5m2, Dtype.fp6_e3m2, Dtype.fp6_e2m3, Dtype.fp4)

SCALE_FORMATS = {
    "e8m0": ScaleType.float8_e8m0fnu,
    "e5m3": ScaleType.float8_e5m3,
    "e4m3": ScaleType.float8_e4m3,
    "float32": ScaleType.float32,
}

REQUIRED = {
    "integer": ("is_dynamic", "observer_cls", "qscheme", "symmetric", "round_method", "scale_type"),
    "int2": ("is_dynamic", "observer_cls", "qscheme"),
    "float": ("is_dynamic", "observer_cls", "qscheme"),
    "block": ("ch_axis", "group_size"),
    "cast": (),
}
"""Fields that a kind of element type cannot do without (int2 leaves three to their defaults)."""

_UNSET: tuple[object, ...] = (None,)
_PLAIN: dict[str, tuple[object, ...]] = {
    "symmetric": (None, True),
    "zero_point_type": (None, ZeroPointType.int32),
    "round_method": (None, RoundType.half_even),
    "scale_type": (None, ScaleType.float),
}
ALLOWED: dict[str, dict[str, tuple[object, ...]]] = {
    "integer": {
        "scale_format": _UNSET,
        "scale_calculation_mode": _UNSET,
        "scale_type": (None, *(s for s in ScaleType if not s.name.startswith("float8"))),
    },
    "float": {"symmetric": (None, True), "zero_point_type": (None, ZeroPointType.int32)},
    "block": {
        **_PLAIN,
        "qscheme": (None, QSchemeType.per_group),
        "block_size": _UNSET,
        "scale_format": (None, "e8m0"),
    },
    "cast": {
        **_PLAIN,
        "qscheme": (None, QSchemeType.per_tensor),
        **dict.fromkeys(("ch_axis", "group_size", "block_size", "scale_format", "scale_calculation_mode"), _UNSET),
    },
}
"""Values that mean something, or nothing worse than the default; any other would be ignored in silence."""

SPLIT = {
    QSchemeType.per_tensor: (),
    QSchemeType.per_channel: ("ch_axis",),
    QSchemeType.per_group: ("ch_axis", "group_size"),
    QSchemeType.per_block: ("block_size",),
}
"""The fields that go with a qscheme: needed, and no others allowed."""


def kind_of(dtype: Dtype) -> str:
    """The kind: "integer", "float", "block" (shared exponent) or "cast" (16-bit float)."""
    if dtype is Dtype.mx or dtype.row.is_block:
        return "block"
    if dtype in (Dtype.float16, Dtype.bfloat16):
        return "cast"
    return "float" if dtype.row.is_float else "integer"


def check_tensor(config: QTensorConfig) -> None:
    """Raise ConfigError for the first inconsistency."""
    kind = kind_of(config.dtype)
    for name in REQUIRED["int2" if config.dtype is Dtype.int2 else kind]:
        if getattr(config, name) is None:
            raise ConfigError(f"QTensorConfig.{name} is required for dtype {config.dtype.name}.")
    for name, allowed in ALLOWED[kind].items():
        if getattr(config, name) not in allowed:
            raise _no_effect(config, name, f"dtype {config.dtype.name}", allowed)
    if kind == "integer" and config.symmetric is not False and config.zero_point_type is ZeroPointType.float32:
        raise ConfigError("QTensorConfig.zero_point_type=float32 needs symmetric=False: a fixed zero point is an int.")
    _check_mx(config)
    _check_split(config, kind)
    _check_scale(config, kind)
    _check_observer(config, kind)
    _check_training(config)


def _check_mx(config: QTensorConfig) -> None:
    element = config.mx_element_dtype
    if config.dtype is not Dtype.mx:
        if element is not None:
            raise _no_effect(config, "mx_element_dtype", f"dtype {config.dtype.name}", (None,))
    elif element not in MX_ELEMENTS:
        given = "is required for dtype mx" if element is None else f"={element.name} is no OCP MX element"
        raise ConfigError(f"QTensorConfig.mx_element_dtype {given}. Possible: {_names(MX_ELEMENTS)}.")


def _check_split(config: QTensorConfig, kind: str) -> None:
    size = config.group_size
    if size is not None and size < 1 and size != -1:
        raise ConfigError(f"QTensorConfig.group_size must be positive, or -1 for the whole axis; got {size}.")
    if config.block_size is not None and min(config.block_size) < 1:
        raise ConfigError(f"QTensorConfig.block_size needs two positive sides, got {config.block_size}.")
    if config.qscheme is None or kind in ("block", "cast"):
        return
    wanted = SPLIT[config.qscheme]
    for name in ("ch_axis", "group_size", "block_size"):
        given = getattr(config, name) is not None
        if given and name not in wanted:
            raise _no_effect(config, name, f"qscheme {config.qscheme.name}", (None,))
        if not given and name in wanted:
            raise ConfigError(f"QTensorConfig.{name} is required for qscheme {config.qscheme.name}.")


def _check_scale(config: QTensorConfig, kind: str) -> None:
    mode, form = config.scale_calculation_mode, config.scale_format
    if form is not None and form not in SCALE_FORMATS:
        raise ConfigError(f"QTensorConfig.scale_format: unknown {form!r}. {did_you_mean(form, SCALE_FORMATS)}")
    if form is not None and config.scale_type not in (
        None,
        ScaleType.float,
        ScaleType.float32,
        SCALE_FORMATS[form],
    ):
        raise _no_effect(config, "scale_type", f"scale_format {form!r}", (None, ScaleType.float, SCALE_FORMATS[form]))
    if mode is None:
        return
    rules = [rule.value for rule in ScaleRule]
    if mode not in rules:
        raise ConfigError(f"QTensorConfig.scale_calculation_mode: unknown {mode!r}. {did_you_mean(mode, rules)}")
    if kind == "float" and form != "e8m0" and config.scale_type is not ScaleType.float8_e8m0fnu:
        raise _no_effect(config, "scale_calculation_mode", f"scale_format {form!r}; e8m0 has one", (None,))
    if kind == "block" and config.dtype is not Dtype.mx and mode != "even":
        # These formats share floor(log2 amax) by definition; "even" is what the shorthand specs always write.
        raise _no_effect(config, "scale_calculation_mode", f"dtype {config.dtype.name}", (None, "even"))


def _check_observer(config: QTensorConfig, kind: str) -> None:
    cls = config.observer_cls
    if cls is None:
        return
    if kind == "cast" and cls.observer != "placeholder":
        raise ConfigError(
            f"QTensorConfig.observer_cls={cls.__name__}: {config.dtype.name} is a cast without a scale. "
            "Use PlaceholderObserver."
        )
    scheme = QSchemeType.per_group if kind == "block" else config.qscheme
    if scheme is not None and cls.family not in (None, scheme):
        fitting = [name for name, entry in OBSERVER_CLASSES.items() if entry.family is scheme]
        raise ConfigError(
            f"QTensorConfig.observer_cls={cls.__name__} does not belong to qscheme {scheme.name}. "
            f"Possible: {', '.join(fitting)}."
        )


def _check_training(config: QTensorConfig) -> None:
    learning = config.observer_cls.learning if config.observer_cls else None
    if config.qat_spec is not None and not hasattr(config.qat_spec, "threshold_init_meth"):
        raise ConfigError(f"QTensorConfig.qat_spec: expected a TQTSpec, got {type(config.qat_spec).__name__}.")
    if config.qat_spec is not None and learning is not Learning.tqt:
        raise ConfigError("QTensorConfig.qat_spec=TQTSpec(...) goes with observer_cls=TQTObserver, which trains.")
    if learning is None:
        return
    name = config.observer_cls.__name__  # type: ignore[union-attr]
    if config.is_dynamic:
        raise ConfigError(f"QTensorConfig.observer_cls={name} trains a static scale: is_dynamic=False.")
    if learning is Learning.tqt and (kind_of(config.dtype) != "integer" or config.symmetric is False):
        raise ConfigError(f"QTensorConfig.observer_cls={name} trains symmetric integers; see LSQObserver for others.")


def check_layer(config: QLayerConfig) -> None:
    """Raise ConfigError for a list that is no pair, or for static groups of an activation."""
    for name in ("input_tensors", "output_tensors", "weight", "bias"):
        value = getattr(config, name)
        stages: list[QTensorConfig] = value if isinstance(value, list) else [value] if value is not None else []
        if len(stages) not in (1, 2) and value is not None:
            raise ConfigError(f"QLayerConfig.{name}: a list has two stages, got {len(stages)}.")
        if stages and stages[0].is_scale_quant:
            raise ConfigError(
                f"QLayerConfig.{name}: is_scale_quant=True is for the second of two configs; it quantizes the "
                "scales of the first."
            )
        if name in ("input_tensors", "output_tensors"):
            for stage in stages:
                if stage.qscheme is QSchemeType.per_group and stage.is_dynamic is False:
                    raise ConfigError(
                        f"QLayerConfig.{name}: per_group scales of an activation depend on its shape and "
                        "cannot be calibrated. Set is_dynamic=True."
                    )


def _no_effect(config: QTensorConfig, name: str, against: str, allowed: Iterable[object]) -> ConfigError:
    value = getattr(config, name)
    return ConfigError(
        f"QTensorConfig.{name}={_name(value)} has no meaning with {against}. Possible: {_names(allowed)}."
    )


def _names(values: Iterable[object]) -> str:
    return ", ".join(_name(value) for value in values)


def _name(value: Any) -> str:
    return value.name if isinstance(value, Enum) else repr(value)
