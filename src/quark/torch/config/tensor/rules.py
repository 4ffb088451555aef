"""The rules of which fields of a QTensorConfig fit together, as tables; tensor_config.py checks by them."""

from __future__ import annotations

from quark.core.rounding import RoundType
from quark.core.spec import SHORT_SCALES, ScaleType
from quark.torch.config.tensor.enums import Dtype, QSchemeType, ZeroPointType

MX_ELEMENTS = (Dtype.int8, Dtype.fp8_e4m3, Dtype.fp8_e5m2, Dtype.fp6_e3m2, Dtype.fp6_e2m3, Dtype.fp4)

SCALE_FORMATS = {short: kind for kind, short in SHORT_SCALES.items()} | {"float32": ScaleType.float32}

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
        "scale_type": (None, *(s for s in ScaleType if not s.name.startswith(("float8", "int16")))),
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
