"""MX formats emulated in a float type: what vLLM and SGLang call where a GPU has no instructions for them.

    q = fp4_e2m1 or fp6 codes in groups of 32, s = 2^(e - 127) in E8M0        y = decode(q) s

Names and arguments are those that the serving engines call (`quark.torch.kernel.mx` and beside it); the formulas are
those of quark.core.
"""

from __future__ import annotations

import torch

from quark.core.dtypes import DTYPES, Dtype
from quark.core.granularity import PerGroup
from quark.core.packing import decode, encode, pack_bits, unpack_bits
from quark.core.quantize import fake_quantize
from quark.core.scales import QParams, exp2, qparams_from_range
from quark.core.spec import ScaleRule, ScaleType, TensorSpec
from quark.errors import ConfigError, NotSupportedError, ShapeError, did_you_mean

GROUP = 32
"""Values under one scale in the OCP MX specification."""
ELEMENTS = {"fp4": "fp4_e2m1", "fp6_e2m3": "fp6_e2m3", "fp6_e3m2": "fp6_e3m2"}
"""Names that the engines use -> rows of core/dtypes.py."""


def dq_mxfp4(x: torch.Tensor, scale: torch.Tensor, float_dtype: torch.dtype) -> torch.Tensor:
    """The values of packed MXFP4: x uint8 (..., n / 2), scale uint8 (..., n / 32) in E8M0; (..., n) of `float_dtype`.

    Raises:
        ShapeError: The scales are not those of the codes.
    """
    values = decode(unpack_bits(x, 4), DTYPES["fp4_e2m1"])
    codes = scale.view(torch.uint8).to(torch.int32)  # 2^(e - 127); 255 is NaN
    factors: torch.Tensor = torch.where(codes == 255, torch.nan, exp2(codes.clamp(max=254) - 127))
    return dequantize_fp4_fp6_per_group(values, factors).to(float_dtype)


def qdq_mxfp4(x: torch.Tensor, scale_calculation_mode: str = "even") -> torch.Tensor:
    """Return x rounded to MXFP4, with scales of its own along the last axis, in the shape and dtype of x."""
    rules = {rule.value: rule for rule in ScaleRule}
    if scale_calculation_mode not in rules:
        raise ConfigError(
            f"scale_calculation_mode {scale_calculation_mode!r} is unknown. Possible: {', '.join(rules)}."
        )
    return fake_quantize(x, None, _spec("fp4", GROUP, rules[scale_calculation_mode]))


def even_round(max_abs: torch.Tensor, dtype: object) -> torch.Tensor:
    """The power of two that scales a group whose largest magnitude is `max_abs`, by the rule "even"; float32."""
    largest = max_abs.to(torch.float32)
    return qparams_from_range(-largest, largest, _spec(dtype, GROUP), "float32").scale


def reshape_to_blocks(x: torch.Tensor, block_size: int, axis: int) -> torch.Tensor:
    """Cut `axis` of x into blocks: (all other positions, blocks, block_size); zeros fill the last block."""
    rows = x.transpose(axis, -1)
    rows = rows.reshape(-1, rows.shape[-1])
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % block_size))
    return rows.reshape(rows.shape[0], -1, block_size)


def fake_quantize_fp4_fp6_per_group_with_scale(
    inputs: torch.Tensor, scale: torch.Tensor, axis: int, group_size: int, quant_dtype: object
) -> torch.Tensor:
    """Return `inputs` rounded under given scales of groups along `axis`, in their shape and dtype."""
    x = inputs.transpose(axis, -1)
    scales = scale.transpose(axis, -1) if scale.ndim == inputs.ndim else scale
    scales = _scales_of(scales, x.shape, group_size)
    y: torch.Tensor = fake_quantize(x.contiguous(), QParams(scales), _spec(quant_dtype, group_size))
    return y.transpose(axis, -1)


def dequantize_fp4_fp6_per_group(
    inputs: torch.Tensor, scale: torch.Tensor, axis: int = -1, group_size: int = GROUP, quant_dtype: object = "fp4"
) -> torch.Tensor:
    """Values of codes, times the scales of their groups along `axis`; float32."""
    _element(quant_dtype)
    x = inputs.transpose(axis, -1).to(torch.float32)
    scales = _scales_of(scale.transpose(axis, -1) if scale.ndim == inputs.ndim else scale, x.shape, group_size)
    return (x * scales.repeat_interleave(group_size, -1)[..., : x.shape[-1]]).transpose(axis, -1)


class FloatCodePacking:
    """Packs and unpacks the codes of FP4 and FP6 along the last axis, 8 codes in `bits` bytes."""

    def __init__(self, dtype: Dtype) -> None:
        self.dtype = dtype

    def pack(self, to_pack: torch.Tensor, reorder: bool = False) -> torch.Tensor:
        """Values that the type holds exactly (..., n) -> uint8 (..., n * bits / 8). `reorder` is for integers."""
        return pack_bits(encode(to_pack.to(torch.float32), self.dtype), self.dtype.bits)

    def unpack(self, to_unpack: torch.Tensor, reorder: bool = False) -> torch.Tensor:
        """The inverse of `pack`; float32."""
        return decode(unpack_bits(to_unpack.view(torch.uint8), self.dtype.bits), self.dtype)


def create_pack_method(qscheme: str | None, dtype: object, mx_element_dtype: object = None) -> FloatCodePacking:
    """How codes of a type lie in bytes.

    Raises:
        NotSupportedError: Not FP4 or FP6; other codes are read and written by the formats of checkpoints.
    """
    name = str(getattr(dtype, "value", dtype))
    if name not in ELEMENTS:
        raise NotSupportedError(
            f"create_pack_method({name!r}): possible are {', '.join(ELEMENTS)}; export_safetensors and "
            "import_model_from_safetensors write and read the codes of all types."
        )
    return FloatCodePacking(_element(dtype))


def _element(dtype: object) -> Dtype:
    name = str(getattr(dtype, "value", dtype))
    if name not in ELEMENTS:
        raise ConfigError(f"{name!r} is no element type of these functions. {did_you_mean(name, ELEMENTS)}")
    return DTYPES[ELEMENTS[name]]


def _spec(dtype: object, group_size: int, rule: ScaleRule = ScaleRule.even) -> TensorSpec:
    groups = PerGroup(-1, group_size, pad=True)
    return TensorSpec(_element(dtype), groups, scale_type=ScaleType.float8_e8m0fnu, scale_rule=rule)


def _scales_of(scale: torch.Tensor, shape: torch.Size, group_size: int) -> torch.Tensor:
    """The scales as (..., groups) of a tensor of `shape`, whose last axis is cut into groups."""
    wanted = (*shape[:-1], -(-shape[-1] // group_size))
    if scale.numel() != torch.Size(wanted).numel():
        raise ShapeError(
            f"The scales have shape {tuple(scale.shape)}; values of shape {tuple(shape)} in groups of {group_size} "
            f"need {wanted}."
        )
    return scale.to(torch.float32).reshape(wanted)
