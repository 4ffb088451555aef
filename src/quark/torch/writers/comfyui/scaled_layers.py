"""Quantized layers in a safetensors file of ComfyUI: which tensors they are, and what its marker says.

    format              weight                          weight_scale                        value
    float8_e4m3fn       F8_E4M3 (O, I)                  F32 ()                              w * scale
    int8_tensorwise     I8 (O, I)                       F32 (O, 1)                          w * scale
    mxfp8               F8_E4M3 (O, I), whole 32 x 32   U8, exponents + 127, _swizzled       w * 2^(scale - 127)
    nvfp4               U8 (O, I / 2), whole 16 x 16    F8_E4M3, _swizzled; weight_scale_2   w * (scale * scale_2)
    awq_w4a16           I8 (O, I / 2)                   (I / group, O); weight_zeros        (w - 8) * scale + zeros

`comfy_quant` beside them is JSON in bytes: the format, the size of a group of awq_w4a16, and
`full_precision_matrix_mult` where inputs stay in float. `input_scale`, F32 (), is what calibration found of an input:
its scale for float8_e4m3fn, and the scale of its scales for nvfp4. Matrices of whole tiles are filled with zeros; of
two nibbles the upper one is first, of awq_w4a16 the lower one. Swizzled scales lie as cuBLAS wants them: 128 rows and 4
columns are a tile, in which row r is at r % 32, r // 32.

ComfyUI 0.8.1 reads float8_e4m3fn and nvfp4 (comfy/ops.py, `_load_from_state_dict`; comfy/quant_ops.py), and 0.38.1,
with comfy-kitchen 0.2.40, all of them. Versions that know the older marker `scaled_fp8` alone would store every linear
layer in FP8, those without a scale, too: it is not written, although later ones read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerChannel, PerGroup, PerTensor
from quark.core.packing import encode
from quark.core.quantize import quantize, recover_codes
from quark.core.scales import QParams, exponent
from quark.core.spec import LayerSpec, ScaleType, TensorSpec
from quark.errors import NotSupportedError, ShapeError
from quark.torch.formats.layout import Tensors

FP8, INT8, MXFP8, NVFP4, INT4 = "float8_e4m3fn", "int8_tensorwise", "mxfp8", "nvfp4", "awq_w4a16"
TILE = {FP8: 1, INT8: 1, MXFP8: 32, NVFP4: 16, INT4: 1}
"""Format -> of what rows and columns are whole numbers."""
STORED = {
    FP8: torch.float8_e4m3fn, INT8: torch.int8, MXFP8: torch.float8_e4m3fn, NVFP4: torch.uint8, INT4: torch.int8
}  # fmt: skip
_OF_TWO = (NVFP4, INT4)
"""Formats of which a byte holds two values."""
_MIDDLE = 8
"""Of unsigned nibbles: the one that stands for zero."""
ROWS, COLUMNS = 128, 4
"""Scales in a tile of cuBLAS."""
_HOLDS = {
    ("fp8_e4m3", "tensor", False, False): FP8,
    ("int8", "tensor", False, False): INT8,
    ("int8", "row", False, False): INT8,
    ("fp8_e4m3", "32", True, False): MXFP8,
    ("fp4_e2m1", "16", False, True): NVFP4,
    **dict.fromkeys([("int4", group, False, False) for group in ("32", "64", "128")], INT4),
}
"""Element type, values that share a scale, whether scales are E8M0, and whether they have a scale -> format."""
INPUTS = {FP8: "fp8", INT8: "int8_dynamic", MXFP8: "mxfp8_e4m3", NVFP4: "nvfp4"}
"""Format -> scheme of the inputs that ComfyUI gives a layer without `full_precision_matrix_mult`."""
POSSIBLE = "fp8_wo, fp8, int8_wo, int8_dynamic, int4_wo_64, mxfp8_e4m3, nvfp4; GGUF types"
"""Schemes that have a format, for messages."""


def format_of(spec: LayerSpec) -> str:
    """ComfyUI's name of a scheme. Raises NotSupportedError where it has none."""
    weight = spec.weight
    found = _weight_format(weight) if weight is not None and spec.output is None and spec.bias is None else None
    if found is None or not (spec.input is None or _takes_input(found, spec.input)):
        raise NotSupportedError(f"ComfyUI has no format for {spec}. Possible: {POSSIBLE}.")
    return found


def is_static(spec: LayerSpec) -> bool:
    """Return True where a layer has an input with a scale that only data give."""
    return spec.input is not None and not spec.input.dynamic


def check_shape(name: str, shape: tuple[int, ...], spec: LayerSpec) -> None:
    """Raise ShapeError for a matrix whose rows are no whole groups of a format that fills none."""
    split = None if spec.weight is None else spec.weight.granularity
    if format_of(spec) == INT4 and isinstance(split, PerGroup) and shape[1] % split.size:
        raise ShapeError(
            f"{name} has rows of {shape[1]}, which are no whole groups of {split.size}. Possible: smaller groups "
            f"(int4_wo_32), another scheme for it (--layer '{name}=fp8_wo'), or --exclude '{name}'."
        )


def _weight_format(weight: TensorSpec) -> str | None:
    if not weight.symmetric or weight.code_spec is not None:
        return None
    split, blocks = weight.granularity, weight.scale_type is ScaleType.float8_e8m0fnu
    if isinstance(split, PerGroup):
        sharing = str(split.size) if split.axis in (-1, 1) else ""
    else:
        sharing = {PerTensor(): "tensor", PerChannel(0): "row"}.get(split, "")
    return _HOLDS.get((weight.dtype.name, sharing, blocks, weight.scale_spec is not None))


def _takes_input(form: str, tensor: TensorSpec) -> bool:
    """Return True where ComfyUI computes with inputs of this spec: in the type of the weight, static for FP8 alone."""
    from quark.core.schemes import SCHEMES

    other = SCHEMES[INPUTS[form]].input if form in INPUTS else None
    if other is None:
        return False
    return all(getattr(tensor, name) == getattr(other, name) for name in ("dtype", "granularity", "dynamic"))


def marker(form: str, spec: LayerSpec) -> torch.Tensor:
    """The bytes of `comfy_quant`."""
    said: dict[str, object] = {"format": form}
    if form == INT4:  # of which inputs are float in any case
        assert spec.weight is not None and isinstance(spec.weight.granularity, PerGroup)
        said["group_size"] = spec.weight.granularity.size
    elif spec.input is None:
        said["full_precision_matrix_mult"] = True
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def whole(size: int, tile: int) -> int:
    """The next whole number of tiles."""
    return -(-size // tile) * tile


def likes(shape: tuple[int, ...], spec: LayerSpec, dtype: torch.dtype, calibrated: bool) -> Tensors:
    """The stored tensors of a layer by the ends of their names, on the meta device.

    Args:
        shape: Of its weight.
        spec: Of the layer.
        dtype: Of its float weight.
        calibrated: Whether its input has a scale.
    """
    form = format_of(spec)
    rows, columns = (whole(size, TILE[form]) for size in shape)
    made = {"weight": _meta((rows, columns // 2 if form in _OF_TWO else columns), STORED[form])}
    split = spec.weight.granularity if spec.weight is not None else PerTensor()
    if form in (MXFP8, NVFP4):
        assert isinstance(split, PerGroup)
        place = (whole(rows, ROWS), whole(columns // split.size, COLUMNS))
        made["weight_scale"] = _meta(place, torch.uint8 if form == MXFP8 else torch.float8_e4m3fn)
        made |= {"weight_scale_2": _meta((), torch.float32)} if form == NVFP4 else {}
    elif form == INT4:
        assert isinstance(split, PerGroup)
        made |= {end: _meta((columns // split.size, rows), dtype) for end in ("weight_scale", "weight_zeros")}
    else:
        made["weight_scale"] = _meta((rows, 1) if split != PerTensor() else (), torch.float32)
    made |= {"input_scale": _meta((), torch.float32)} if calibrated else {}
    return made | {"comfy_quant": marker(form, spec).to("meta")}


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def padded(x: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """A weight (O, I), or its codes, filled with zeros to whole tiles of its format."""
    tile = TILE[format_of(spec)]
    return _filled(x, *(whole(size, tile) for size in x.shape))


def _filled(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    more = (0, columns - x.shape[1], 0, rows - x.shape[0])
    return torch.nn.functional.pad(x, more) if any(more) else x


def stored(
    x: torch.Tensor, params: QParams, spec: LayerSpec, frozen: bool = False, input_scale: torch.Tensor | None = None
) -> Tensors:
    """The tensors of a layer by the ends of their names.

    Args:
        x: Weight (O, I), whose rows are whole groups.
        params: Its scales.
        spec: Of the layer.
        frozen: Whether x holds quantized values already, which are kept.
        input_scale: What calibration found of the input; None: nothing.
    """
    assert spec.weight is not None
    form, codes = format_of(spec), quantize(x, params, spec.weight)
    codes = padded(recover_codes(x, codes, params, spec.weight) if frozen else codes, spec)
    made = {"weight": _codes(codes, form), "comfy_quant": marker(form, spec)}
    if input_scale is not None:
        made["input_scale"] = input_scale.float().reshape(())
    if form == INT4:
        scales = params.scale.to(x.dtype).reshape(x.shape[0], -1).t().contiguous()
        return made | {"weight_scale": scales, "weight_zeros": torch.zeros_like(scales)}
    if form == MXFP8:
        scales = (exponent(params.scale) + 127).to(torch.uint8).reshape(x.shape[0], -1)
        return made | {"weight_scale": _swizzled(_filled(scales, codes.shape[0], scales.shape[1]))}
    if form == NVFP4:
        assert params.second is not None
        scales = params.scale.to(torch.float8_e4m3fn).reshape(x.shape[0], -1)
        return made | {"weight_scale": _swizzled(scales), "weight_scale_2": params.second.scale.float().reshape(())}
    by_row = spec.weight.granularity != PerTensor()
    return made | {"weight_scale": params.scale.float().reshape((-1, 1) if by_row else ())}


def _codes(codes: torch.Tensor, form: str) -> torch.Tensor:
    if form not in _OF_TWO:
        return codes.to(STORED[form])
    if form == INT4:
        nibbles = (codes + _MIDDLE).to(torch.uint8)
        return (nibbles[:, 1::2] << 4 | nibbles[:, ::2]).view(torch.int8)
    bits = encode(codes, DTYPES["fp4_e2m1"]).to(torch.uint8)
    return bits[:, ::2] << 4 | bits[:, 1::2]


def _swizzled(scales: torch.Tensor) -> torch.Tensor:
    """Scales (O, I / group) as cuBLAS reads them, in whole tiles of 128 rows and 4 columns."""
    rows, columns = whole(scales.shape[0], ROWS), whole(scales.shape[1], COLUMNS)
    as_bytes = scales.contiguous().view(torch.uint8)
    full = torch.nn.functional.pad(as_bytes, (0, columns - scales.shape[1], 0, rows - scales.shape[0]))
    tiles = full.reshape(rows // ROWS, 4, 32, columns // COLUMNS, COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns).contiguous().view(scales.dtype)


def names_of(layer: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a layer under their names in the file."""
    return {f"{layer}.{end}": tensor for end, tensor in tensors.items()}
