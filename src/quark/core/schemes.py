"""The named schemes: one row each, weight and input activation of a linear layer.

`wo` is weight-only; the number is the group size along the input axis. A scheme of one's own is one `register` call.
"""

from __future__ import annotations

from dataclasses import replace

from quark.core.blocks.block_types import BLOCK_TYPES
from quark.core.granularity import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quark.core.names.registry import Registry
from quark.core.spec import LayerSpec, ScaleType, TensorSpec, block_spec, spec

SCHEMES: Registry[LayerSpec] = Registry("scheme")


def _integer(dtype: str, group: int | None = None, symmetric: bool = True) -> TensorSpec:
    """Integer weights per output channel, or per group of inputs; the scale has the model's dtype."""
    split = PerChannel(0) if group is None else PerGroup(-1, group)
    return spec(dtype, split, symmetric=symmetric, scale_type=ScaleType.float)


def _ocp(dtype: str) -> TensorSpec:
    """OCP MX v1.0: blocks of 32 along the input axis under an E8M0 scale."""
    return spec(dtype, PerGroup(-1, 32, pad=True), scale_type=ScaleType.float8_e8m0fnu, observer="block")


def _block(dtype: str, size: int) -> TensorSpec:
    return spec(dtype, PerGroup(-1, size, pad=True), observer="block")


def _amdfp4(group: int) -> TensorSpec:
    return spec("fp4_e2m1", PerGroup(-1, group), scale_type=ScaleType.float8_e5m3, observer="block")


def _two_level_fp4(group: int, scale_dtype: str) -> TensorSpec:
    """FP4 groups whose scales are `scale_dtype` codes under one float32 scale of the tensor (NVFP4)."""
    return spec("fp4_e2m1", PerGroup(-1, group), scale_spec=spec(scale_dtype), observer="block")


def _live(tensor: TensorSpec) -> TensorSpec:
    return replace(tensor, dynamic=True)


_FP8 = spec("fp8_e4m3", scale_type=ScaleType.float)
_INT8 = spec("int8", scale_type=ScaleType.float)
_INT8_CHANNEL = _integer("int8")
_FP8_TOKEN = spec("fp8_e4m3", PerToken(), scale_type=ScaleType.float, dynamic=True)
_PROGRESSIVE = replace(
    spec("fp8_e4m3", PerTensor(), scale_type=ScaleType.float32),
    code_spec=spec("int4", PerChannel(0), scale_type=ScaleType.float32),
)


def _row(name: str, weight: TensorSpec, activation: TensorSpec | None = None) -> None:
    SCHEMES.register(name, LayerSpec(weight=weight, input=activation))


for _group in (32, 64, 128):
    _row(f"int4_wo_{_group}", _integer("int4", _group))
_row("int4_wo_per_channel", _integer("int4"))
_row("int4_wa_64", _integer("int4", 64), _live(_integer("int4", 64)))
for _group in (32, 64, 128):
    _row(f"uint4_wo_{_group}", _integer("uint4", _group, symmetric=False))
_row("uint4_wo_per_channel", _integer("uint4", symmetric=False))
_row("int8", _INT8, _INT8)
_row("fp8", _FP8, _FP8)
_row("ptpc_fp8", spec("fp8_e4m3", PerChannel(0), scale_type=ScaleType.float), _FP8_TOKEN)
_row(
    "fp8_block_128",  # the form of DeepSeek V3: tiles of weights, and as many live values of a token
    spec("fp8_e4m3", PerBlock((128, 128), pad=True), scale_type=ScaleType.float),
    spec("fp8_e4m3", PerGroup(-1, 128, pad=True), scale_type=ScaleType.float32, dynamic=True),
)
_row("mxfp4", _ocp("fp4_e2m1"), _live(_ocp("fp4_e2m1")))
_row("mxfp4_weight_only", _ocp("fp4_e2m1"))
_row("mxfp6_e3m2", _ocp("fp6_e3m2"), _live(_ocp("fp6_e3m2")))
_row("mxfp6_e2m3", _ocp("fp6_e2m3"), _live(_ocp("fp6_e2m3")))
_row("mxfp4_mxfp6_e2m3", _ocp("fp4_e2m1"), _live(_ocp("fp6_e2m3")))
_row("mxfp4_fp8", _ocp("fp4_e2m1"), _FP8)
_row("amdfp4", _amdfp4(16), _live(_amdfp4(16)))
_row("amdfp4_g32", _amdfp4(32), _live(_amdfp4(32)))
_row("int4_fp8_128", _integer("int4", 128), _FP8_TOKEN)  # W4AFP8 of compressed-tensors
_row("int4_fp8", _PROGRESSIVE, spec("fp8_e4m3", scale_type=ScaleType.float32, dynamic=True))
for _name, _size in (("mx6", 16), ("mx9", 16), ("bfp16", 8)):
    _row(_name, _block(_name, _size), _live(_block(_name, _size)))
for _name, _group, _scales in (
    ("nvfp4", 16, "fp8_e4m3"),
    ("fp4_block16_scale_e4m3", 16, "fp8_e4m3"),
    ("amdfp4_global16", 16, "fp8_e5m3"),
    ("amdfp4_global32", 32, "fp8_e5m3"),
):
    _row(_name, _two_level_fp4(_group, _scales), _live(_two_level_fp4(_group, _scales)))

# Beyond the documented list: the remaining element types, and the usual names of the field.
_row("int8_wo", _INT8_CHANNEL)
_row("fp8_wo", _FP8)
_row("int8_dynamic", _INT8_CHANNEL, spec("int8", PerToken(), dynamic=True))
for _group in (32, 64, 128):
    _row(f"int3_wo_{_group}", _integer("int3", _group))
_row("int2_wo_64", _integer("int2", 64))
_row("uint2_wo_64", _integer("uint2", 64, symmetric=False))
_row("mx4", _block("mx4", 16), _live(_block("mx4", 16)))
_row("mxint8", _ocp("mxint8"), _live(_ocp("mxint8")))
_row("mxfp8_e4m3", _ocp("fp8_e4m3"), _live(_ocp("fp8_e4m3")))
_row("mxfp8_e5m2", _ocp("fp8_e5m2"), _live(_ocp("fp8_e5m2")))
_row("mxfp6_e2m3_weight_only", _ocp("fp6_e2m3"))
_row("nvfp4_weight_only", _two_level_fp4(16, "fp8_e4m3"))  # NVFP4A16 of compressed-tensors
for _name in ("float16", "bfloat16"):
    _row(_name, spec(_name, observer="placeholder"))

OLD_SCHEMES: dict[str, str] = {
    "w_uint4_per_group_asym": "uint4_wo_128",
    "w_uint4_per_channel_asym": "uint4_wo_per_channel",
    "w_int4_per_group_sym": "int4_wo_128",
    "w_int4_per_channel_sym": "int4_wo_per_channel",
    "w_int8_a_int8_per_tensor_sym": "int8",
    "w_fp8_a_fp8": "fp8",
    "w_mxfp4": "mxfp4_weight_only",
    "w_mxfp4_a_mxfp4": "mxfp4",
    "w_mxfp4_a_fp8": "mxfp4_fp8",
    "w_mxfp4_a_mxfp6_e2m3": "mxfp4_mxfp6_e2m3",
    "w_mxfp6_e3m2_a_mxfp6_e3m2": "mxfp6_e3m2",
    "w_mxfp6_e2m3_a_mxfp6_e2m3": "mxfp6_e2m3",
    "w_mx6_a_mx6": "mx6",
    "w_mx9_a_mx9": "mx9",
    "w_bfp16_a_bfp16": "bfp16",
    "w_mxfp6_e2m3": "mxfp6_e2m3_weight_only",
    "w_mxfp8_a_mxfp8": "mxfp8_e4m3",
    "w_mx_fp8_a_mx_fp8": "mxfp8_e4m3",
}
"""Names of schemes up to version 0.10."""


def in_smaller_groups(name: str) -> list[str]:
    """The schemes that differ from one only in smaller groups of weights, the largest groups first.

    >>> in_smaller_groups("uint4_wo_128")
    ['uint4_wo_64', 'uint4_wo_32']
    """
    if name not in SCHEMES or (weight := SCHEMES[name].weight) is None:
        return []
    sizes = {}
    for other, layer in SCHEMES.items():
        groups = None if layer.weight is None else layer.weight.granularity
        if isinstance(groups, PerGroup) and isinstance(weight.granularity, PerGroup):
            same = replace(layer, weight=replace(weight, granularity=replace(weight.granularity, size=groups.size)))
            if layer == replace(same, input=SCHEMES[name].input) and groups.size < weight.granularity.size:
                sizes[other] = groups.size
    return sorted(sizes, key=lambda other: -sizes[other])


def scheme_of(name: str) -> LayerSpec:
    """The scheme of this name, or the weights of a block type. Raises ConfigError with the nearest names."""
    return LayerSpec(weight=block_spec(name)) if name in BLOCK_TYPES and name not in SCHEMES else SCHEMES[name]
