"""A TensorSpec as the arguments of a `compressed-tensors` scheme, and back."""

from __future__ import annotations

from typing import Any

from quark.core.dtypes import DTYPES
from quark.core.granularity import HEADS, Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quark.core.spec import FLOAT_SCALES, ScaleRule, ScaleType, TensorSpec
from quark.core.spec import spec as make_spec
from quark.errors import FormatError

FORMATS_OF_FLOATS = {
    ("fp4_e2m1", False): "mxfp4-pack-quantized",
    ("fp4_e2m1", True): "nvfp4-pack-quantized",
    ("fp6_e2m3", False): "mxfp6-pack-quantized",
    ("fp8_e4m3", False): "mxfp8-quantized",
}
"""Of float weights in groups: element type, whether the scales are quantized -> form."""
FLOATS = {4: "fp4_e2m1", 6: "fp6_e2m3", 8: "fp8_e4m3"}
E8M0 = ScaleType.float8_e8m0fnu
CACHE = "kv_cache_scheme"
"""The arguments of the KV cache."""
NUMBERS = (*FLOAT_SCALES, ScaleType.pof2)
"""Types of scales that are stored as floats."""


def refuse_args(spec: TensorSpec, role: str) -> str | None:
    """Why these arguments have no word for the spec of a weight or an input; None if they have."""
    dtype, split = spec.dtype, spec.granularity
    if spec.code_spec or spec.float_zero_point or dtype.is_block or spec.is_cast:
        return f"a {role} in {spec}"
    if not dtype.is_float:
        return None if dtype.bits <= 8 and spec.scale_type in NUMBERS and _splits(split, role) else f"{spec}"
    if dtype.name not in FLOATS.values():
        return f"the type {dtype}"
    has_numbers = dtype.bits == 8 and spec.scale_type in NUMBERS and not spec.scale_spec
    return None if (_splits(split, role) if has_numbers else _is_microscaled(spec, role)) else f"a {role} in {spec}"


def _is_microscaled(spec: TensorSpec, role: str) -> bool:
    """Return True where a spec is that of NVFP4, or of an MX format."""
    split, scales = spec.granularity, spec.scale_spec
    if not isinstance(split, PerGroup) or split.axis not in (-1, 1):
        return False
    if split.size == 16:
        return scales is not None and scales.dtype.name == "fp8_e4m3" and spec.dtype.bits == 4
    return split.size == 32 and spec.scale_type is E8M0 and (role == "weight" or spec.scale_rule is ScaleRule.even)


def _splits(split: Granularity, role: str) -> bool:
    if isinstance(split, PerGroup):
        return split.axis in (-1, 1) and (split.size > 0 or role == "weight")
    return isinstance(split, (PerTensor, PerChannel, PerBlock) if role == "weight" else (PerTensor, PerToken)) and (
        getattr(split, "axis", 0) == 0
    )


def write_args(spec: TensorSpec, role: str) -> dict[str, Any]:
    """The arguments of a weight, an input or the KV cache."""
    scale_dtype: str | None = None
    dynamic: bool | str = spec.dynamic
    if spec.scale_spec is not None:
        scale_dtype = "torch.float8_e4m3fn"
        # Of two levels only the scales of groups follow the live tensor.
        dynamic = "local" if spec.dynamic else False
    elif spec.scale_type is E8M0:
        scale_dtype = "torch.uint8"
    return {
        "num_bits": spec.dtype.bits,
        "type": "float" if spec.dtype.is_float else "int",
        "symmetric": spec.symmetric,
        **_write_split(spec),
        "dynamic": dynamic,
        **({"scale_dtype": scale_dtype} if scale_dtype else {}),
        **({"zp_dtype": "torch.int8"} if not spec.symmetric else {}),
        **({"observer": "minmax"} if role == "weight" or not spec.dynamic else {}),
    }


def _write_split(spec: TensorSpec) -> dict[str, Any]:
    split = spec.granularity
    if isinstance(split, PerGroup) and split.size > 0:
        return {"strategy": "tensor_group" if spec.scale_spec else "group", "group_size": split.size}
    if isinstance(split, PerBlock):
        return {"strategy": "block", "block_structure": list(split.size)}
    if isinstance(split, PerTensor):
        return {"strategy": "tensor"}
    if split == HEADS:
        return {"strategy": "attn_head"}
    return {"strategy": "token" if isinstance(split, PerToken) else "channel"}


def read_args(args: dict[str, Any], where: str) -> TensorSpec:
    """Inverse of `write_args`. Raises FormatError for arguments that have no spec here."""
    bits, kind = int(args.get("num_bits", 8)), str(args.get("type", "int"))
    name = FLOATS.get(bits) if kind == "float" else f"int{bits}"
    if kind not in ("int", "float") or name not in DTYPES or args.get("actorder") == "group":
        raise FormatError(f"{where}: {bits}-bit {kind} codes (actorder {args.get('actorder')}) cannot be imported.")
    assert name is not None
    split = _read_split(args, where)
    said = {"symmetric": bool(args.get("symmetric", True)), "dynamic": bool(args.get("dynamic", False))}
    if args.get("strategy") == "tensor_group":
        return make_spec(name, split, observer="block", scale_spec=make_spec("fp8_e4m3"), **said)
    exponents = kind == "float" and (bits < 8 or "uint8" in str(args.get("scale_dtype")))
    if exponents and isinstance(split, PerGroup):
        return make_spec(name, PerGroup(-1, split.size, pad=True), scale_type=E8M0, observer="block", **said)
    return make_spec(name, split, **said)


def _read_split(args: dict[str, Any], where: str) -> Granularity:
    strategy, size = args.get("strategy"), args.get("group_size")
    if strategy is None:
        strategy = "tensor" if size is None else "group" if size > 0 else "channel"
    if strategy in ("group", "tensor_group"):
        return PerGroup(-1, int(size or 0))
    if strategy == "block":
        rows, columns = args["block_structure"]
        return PerBlock((int(rows), int(columns)), pad=True)
    simple: dict[str, Granularity] = {"tensor": PerTensor(), "channel": PerChannel(0), "token": PerToken()}
    if where == CACHE:
        simple = {"tensor": PerTensor(), "attn_head": HEADS}
    if strategy not in simple:
        raise FormatError(f"{where}: the strategy {strategy!r} cannot be imported.")
    return simple[strategy]
