"""Quantized layers in a safetensors file of ComfyUI: which tensors they are, and what its marker says.

    format              weight                          weight_scale                        value
    float8_e4m3fn       F8_E4M3 (O, I)                  F32 ()                              w * scale
    int8_tensorwise     I8 (O, I)                       F32 (O, 1)                          w * scale
    mxfp8               F8_E4M3 (O, I), whole 32 x 32   U8, exponents + 127, swizzled       w * 2^(scale - 127)
    nvfp4               U8 (O, I / 2), whole 16 x 16    F8_E4M3, swizzled; weight_scale_2   w * (scale * scale_2)

`comfy_quant` beside them is JSON in bytes: the format, and `full_precision_matrix_mult` where inputs stay in float.
Matrices of whole tiles are filled with zeros; of two nibbles the upper one is first. Swizzled scales lie as cuBLAS
wants them: 128 rows and 4 columns are a tile, in which row r is at r % 32, r // 32.

ComfyUI 0.8.1 reads the first and the last (comfy/ops.py, `_load_from_state_dict`; comfy/quant_ops.py), and later ones,
with comfy-kitchen 0.2.40, all four. Versions that know the older marker `scaled_fp8` alone would store every linear
layer in FP8, those without a scale, too: it is not written, although later ones read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from quark.core.dtypes import DTYPES
from quark.core.granularity import Granularity, PerChannel, PerGroup, PerTensor
from quark.core.packing import encode
from quark.core.quantize import quantize
from quark.core.scales import QParams, exponent
from quark.core.spec import LayerSpec, ScaleType, TensorSpec
from quark.errors import NotSupportedError
from quark.torch.formats.layout import Tensors

FP8, INT8, MXFP8, NVFP4 = "float8_e4m3fn", "int8_tensorwise", "mxfp8", "nvfp4"
TILE = {FP8: 1, INT8: 1, MXFP8: 32, NVFP4: 16}
"""Format -> of what rows and columns are whole numbers."""
STORED = {FP8: torch.float8_e4m3fn, INT8: torch.int8, MXFP8: torch.float8_e4m3fn, NVFP4: torch.uint8}
ROWS, COLUMNS = 128, 4
"""Scales in a tile of cuBLAS."""
HOLDS = {
    ("fp8_e4m3", "tensor", False, False): FP8,
    ("int8", "tensor", False, False): INT8,
    ("int8", "row", False, False): INT8,
    ("fp8_e4m3", "32", True, False): MXFP8,
    ("fp4_e2m1", "16", False, True): NVFP4,
}
"""Element type, values that share a scale, whether scales are E8M0, and whether they have a scale -> format."""
LIVE = {FP8: "fp8", INT8: "int8_dynamic", MXFP8: "mxfp8_e4m3", NVFP4: "nvfp4"}
"""Format -> scheme of the inputs that ComfyUI gives a layer without `full_precision_matrix_mult`."""


def format_of(spec: LayerSpec) -> str:
    """ComfyUI's name of a scheme. Raises NotSupportedError where it has none."""
    weight = spec.weight
    found = _weight_format(weight) if weight is not None and spec.output is None and spec.bias is None else None
    if found is None or not (spec.input is None or _is_live(found, spec.input)):
        raise NotSupportedError(
            f"ComfyUI has no format for {spec}. Possible: fp8_wo, int8_wo, int8_dynamic, mxfp8_e4m3, nvfp4; GGUF types."
        )
    return found


def _weight_format(weight: TensorSpec) -> str | None:
    if not weight.symmetric or weight.code_spec is not None:
        return None
    blocks = weight.scale_type is ScaleType.float8_e8m0fnu
    return HOLDS.get((weight.dtype.name, _sharing(weight.granularity), blocks, weight.scale_spec is not None))


def _sharing(split: Granularity) -> str:
    """Which values share a scale."""
    if isinstance(split, PerGroup):
        return str(split.size) if split.axis in (-1, 1) else ""
    return {PerTensor(): "tensor", PerChannel(0): "row"}.get(split, "")


def _is_live(form: str, tensor: TensorSpec) -> bool:
    """Whether inputs of this spec are what ComfyUI computes with: found live, in the type of the weight."""
    from quark.core.schemes import SCHEMES

    other = SCHEMES[LIVE[form]].input
    return form != FP8 and other is not None and (tensor.dtype, tensor.granularity) == (other.dtype, other.granularity)


def marker(form: str, live: bool) -> torch.Tensor:
    """The bytes of `comfy_quant`."""
    said = {"format": form} | ({} if live else {"full_precision_matrix_mult": True})
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def whole(size: int, tile: int) -> int:
    """The next whole number of tiles."""
    return -(-size // tile) * tile


def likes(shape: tuple[int, ...], spec: LayerSpec) -> dict[str, torch.Tensor]:
    """The stored tensors of a layer by the ends of their names, on the meta device."""
    form = format_of(spec)
    rows, columns = (whole(size, TILE[form]) for size in shape)
    made = {"weight": _meta((rows, columns // 2 if form == NVFP4 else columns), STORED[form])}
    group = {MXFP8: 32, NVFP4: 16}.get(form)
    if group is not None:
        place = (whole(rows, ROWS), whole(columns // group, COLUMNS))
        made["weight_scale"] = _meta(place, torch.uint8 if form == MXFP8 else torch.float8_e4m3fn)
        made |= {"weight_scale_2": _meta((), torch.float32)} if form == NVFP4 else {}
    else:
        by_row = spec.weight is not None and spec.weight.granularity != PerTensor()
        made["weight_scale"] = _meta((rows, 1) if by_row else (), torch.float32)
    return made | {"comfy_quant": marker(form, spec.input is not None).to("meta")}


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def padded(x: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """A weight (O, I), filled with zeros to whole tiles of its format."""
    tile = TILE[format_of(spec)]
    rows, columns = (whole(size, tile) - size for size in x.shape)
    return torch.nn.functional.pad(x, (0, columns, 0, rows)) if rows or columns else x


def stored(x: torch.Tensor, params: QParams, spec: LayerSpec) -> Tensors:
    """The tensors of a layer by the ends of their names.

    Args:
        x: Weight of whole tiles.
        params: Of its whole.
        spec: Of the layer.
    """
    assert spec.weight is not None
    form, codes = format_of(spec), quantize(x, params, spec.weight)
    made = {"weight": _codes(codes, form), "comfy_quant": marker(form, spec.input is not None)}
    if form == MXFP8:
        scales = (exponent(params.scale) + 127).to(torch.uint8)
        return made | {"weight_scale": swizzled(scales.reshape(x.shape[0], -1))}
    if form == NVFP4:
        assert params.second is not None
        scales = params.scale.to(torch.float8_e4m3fn).reshape(x.shape[0], -1)
        return made | {"weight_scale": swizzled(scales), "weight_scale_2": params.second.scale.float().reshape(())}
    by_row = spec.weight.granularity != PerTensor()
    return made | {"weight_scale": params.scale.float().reshape((-1, 1) if by_row else ())}


def _codes(codes: torch.Tensor, form: str) -> torch.Tensor:
    if form != NVFP4:
        return codes.to(STORED[form])
    bits = encode(codes, DTYPES["fp4_e2m1"]).to(torch.uint8)
    return bits[:, ::2] << 4 | bits[:, 1::2]


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """Scales (O, I / group) as cuBLAS reads them, in whole tiles of 128 rows and 4 columns."""
    rows, columns = whole(scales.shape[0], ROWS), whole(scales.shape[1], COLUMNS)
    as_bytes = scales.contiguous().view(torch.uint8)
    full = torch.nn.functional.pad(as_bytes, (0, columns - scales.shape[1], 0, rows - scales.shape[0]))
    tiles = full.reshape(rows // ROWS, 4, 32, columns // COLUMNS, COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns).contiguous().view(scales.dtype)


def names_of(layer: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a layer under their names in the file."""
    return {f"{layer}.{end}": tensor for end, tensor in tensors.items()}
