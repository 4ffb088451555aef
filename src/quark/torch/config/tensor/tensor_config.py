"""QTensorConfig, the documented config of one tensor, and what makes one consistent.

rules.py has the tables of what goes together; here are the checks that read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from quark.base.checked import as_dict, checked_dataclass, known_keys
from quark.core.rounding import RoundType
from quark.core.spec import Learning, ScaleRule, ScaleType
from quark.errors import ConfigError, did_you_mean
from quark.torch.config.tensor.enums import Dtype, QSchemeType, ZeroPointType
from quark.torch.config.tensor.observer_classes import OBSERVER_CLASSES, ObserverBase, observer_of_scheme
from quark.torch.config.tensor.rules import ALLOWED, MX_ELEMENTS, REQUIRED, SCALE_FORMATS, SPLIT, kind_of

__all__ = ["QTensorConfig", "QuantizationSpec"]


@checked_dataclass
class QTensorConfig:
    """How one tensor is quantized.

    Attributes:
        dtype: Element type.
        observer_cls: Finds the range; a class of quark.torch.config.tensor.observer_classes, a subclass of one's own,
            or its name.
        is_dynamic: Scales from each live tensor instead of from calibration.
        qscheme: Which values share a scale.
        ch_axis: Axis of per_channel and per_group.
        group_size: Values in a group; -1 is the whole axis.
        block_size: (rows, columns) of a per_block tile.
        symmetric: Zero point fixed.
        round_method: Rounding of the codes.
        scale_type: Type of the scale; `float` is the model's dtype.
        scale_format: Type of the scale of a float group: "e8m0", "e4m3", "e5m3" or "float32".
        scale_calculation_mode: Rule of the e8m0 exponent: "even", "floor" or "ceil".
        qat_spec: A TQTSpec, which says where TQTObserver starts; LSQObserver needs none.
        mx_element_dtype: Element type of Dtype.mx.
        zero_point_type: Type of the zero point.
        is_scale_quant: Second of two configs: it quantizes the scales of the first.
        enable_buffer_reuse, max_input_numel: Accepted and recorded; they change nothing here.

    Raises:
        ConfigError: a field is unknown, missing, of the wrong type, or contradicts another.
    """

    dtype: Dtype
    observer_cls: type[ObserverBase] | None = None
    is_dynamic: bool | None = None
    qscheme: QSchemeType | None = None
    ch_axis: int | None = None
    group_size: int | None = None
    block_size: tuple[int, int] | None = None
    symmetric: bool | None = None
    round_method: RoundType | None = None
    scale_type: ScaleType | None = None
    scale_format: str | None = None
    scale_calculation_mode: str | None = None
    qat_spec: Any = None
    mx_element_dtype: Dtype | None = None
    zero_point_type: ZeroPointType | None = ZeroPointType.int32
    is_scale_quant: bool = False
    enable_buffer_reuse: bool = False
    max_input_numel: int = 4194304

    @classmethod
    def _accept(cls, values: dict[str, Any]) -> None:
        if isinstance(values.get("observer_cls"), str):
            values["observer_cls"] = OBSERVER_CLASSES[values["observer_cls"]]
        if isinstance(values.get("block_size"), list):
            values["block_size"] = tuple(values["block_size"])

    def _check(self) -> None:
        _check_tensor(self)

    def set_group_size(self, group_size: int) -> None:
        """Change the group size of this config: the one documented setter."""
        self.group_size = group_size

    def is_ocp_mxfp4(self) -> bool:
        """True where this is OCP MXFP4: fp4 in groups of 32 under an E8M0 scale."""
        ocp = (Dtype.fp4, QSchemeType.per_group, 32, "e8m0")
        element = (Dtype.mx, None, 32, None) if self.mx_element_dtype is Dtype.fp4 else ocp
        return (self.dtype, self.qscheme, self.group_size, self.scale_format) in (ocp, element)

    def to_dict(self) -> dict[str, Any]:
        """The 17 keys of the checkpoint format, in its order; enums by name."""

        def name(value: Any) -> Any:
            return None if value is None else value.name

        return {
            "dtype": name(self.dtype),
            "is_dynamic": self.is_dynamic,
            "qscheme": name(self.qscheme),
            "ch_axis": self.ch_axis,
            "group_size": self.group_size,
            "block_size": None if self.block_size is None else list(self.block_size),
            "symmetric": self.symmetric,
            "round_method": name(self.round_method),
            "scale_type": name(self.scale_type),
            "zero_point_type": name(self.zero_point_type),
            "scale_format": self.scale_format,
            "scale_calculation_mode": self.scale_calculation_mode,
            "mx_element_dtype": name(self.mx_element_dtype),
            "observer_cls": None if self.observer_cls is None else self.observer_cls.__name__,
            "is_scale_quant": self.is_scale_quant,
            "enable_buffer_reuse": self.enable_buffer_reuse,
            "max_input_numel": self.max_input_numel,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QTensorConfig:
        """Read what `to_dict` wrote, or an older version: `dynamic`, `axis`, keys that did not exist yet."""
        legacy = {"dynamic": "is_dynamic", "axis": "ch_axis"}
        values = known_keys({legacy.get(key, key): value for key, value in as_dict(data, cls.__name__).items()}, cls)
        if values.get("observer_cls") is None and values.get("qscheme") is not None:
            values["observer_cls"] = observer_of_scheme(values["qscheme"])
        return cls(**values)


QuantizationSpec = QTensorConfig


def _check_tensor(config: QTensorConfig) -> None:
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
    if config.qat_spec is not None:
        if not hasattr(config.qat_spec, "threshold_init_meth"):
            raise ConfigError(f"QTensorConfig.qat_spec: expected a TQTSpec, got {type(config.qat_spec).__name__}.")
        if learning is not Learning.tqt:
            raise ConfigError("QTensorConfig.qat_spec=TQTSpec(...) goes with observer_cls=TQTObserver, which trains.")
    if learning is None:
        return
    name = config.observer_cls.__name__  # type: ignore[union-attr]
    if config.is_dynamic:
        raise ConfigError(f"QTensorConfig.observer_cls={name} trains a static scale: is_dynamic=False.")
    if learning is Learning.tqt and (kind_of(config.dtype) != "integer" or config.symmetric is False):
        raise ConfigError(f"QTensorConfig.observer_cls={name} trains symmetric integers; see LSQObserver for others.")


def _no_effect(config: QTensorConfig, name: str, against: str, allowed: Iterable[object]) -> ConfigError:
    value = getattr(config, name)
    return ConfigError(
        f"QTensorConfig.{name}={_name(value)} has no meaning with {against}. Possible: {_names(allowed)}."
    )


def _names(values: Iterable[object]) -> str:
    return ", ".join(_name(value) for value in values)


def _name(value: Any) -> str:
    return value.name if isinstance(value, Enum) else repr(value)
