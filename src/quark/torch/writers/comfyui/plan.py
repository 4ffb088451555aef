"""Plans a denoiser's file for ComfyUI: which of its tensors are quantized, and how.

Which tensors a GGUF file holds in which type is what ComfyUI-GGUF's tools make of them (tools/convert.py and
tools/lcpp.patch): vectors and small tensors in float32, others that are not quantized in 16 bits, matrices in the types
of a mix, of which some layers get wider ones. The weights of a UNet's convolutions become matrices of 256 columns, and
`comfy.gguf.orig_shape.NAME` says what they were. Rows that a type does not divide get the next one that does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quark.core.blocks.block_types import fitting_block_type
from quark.core.names.patterns import first_match, matches_any, require_matches
from quark.core.spec import LayerSpec
from quark.errors import ConfigError, NotSupportedError
from quark.gguf import MIXES
from quark.torch.writers.comfyui.names import OriginalTensor
from quark.torch.writers.comfyui.scaled_layers import POSSIBLE, check_shape, format_of
from quark.torch.writers.comfyui.source import DenoiserSource

SMALL, SHAPED, COLUMNS = 1024, 512, 256
"""Values of a tensor that is float32 in any case; of one that may become a matrix; columns of such a matrix."""
ROLES = {
    "values": (
        "attn_v.weight", ".to_v.weight", ".v.weight", ".attn.w1v.weight", ".attn.w2v.weight", "_attn.v_proj.weight",
    ),
    "qkv": ("attn_qkv.weight", "attn.qkv.weight", "attention.qkv.weight"),
    "down": (
        "ffn_down", ".ffn.2.weight", ".ff.net.2.weight", ".mlp.layer2.weight", ".adaln_modulation_mlp.2.weight",
        ".feed_forward.w2.weight",
    ),
}  # fmt: skip
"""Role -> parts of original names, in the order in which they are asked (`img_tensor_get_type` of the patch)."""
_WIDER: dict[tuple[str, str], tuple[str, int, str]] = {
    ("q2_k", "values"): ("q3_k", 0, "q3_k"),
    ("q3_k_m", "values"): ("q5_k", 2, "q4_k"),
    ("q3_k_l", "values"): ("q5_k", 0, "q5_k"),
    ("q4_k_s", "values"): ("q5_k", 4, "q4_k"),
    ("q4_k_m", "values"): ("q6_k", 0, "q6_k"),
    ("q5_k_m", "values"): ("q6_k", 0, "q6_k"),
    ("q3_k_m", "qkv"): ("q4_k", 0, "q4_k"),
    ("q3_k_l", "qkv"): ("q4_k", 0, "q4_k"),
    ("q4_k_m", "qkv"): ("q5_k", 0, "q5_k"),
    ("q5_k_m", "qkv"): ("q6_k", 0, "q6_k"),
    ("q3_k_m", "down"): ("q4_k", 0, "q4_k"),
    ("q3_k_l", "down"): ("q5_k", 0, "q5_k"),
    ("q4_k_s", "down"): ("q5_k", 0, "q5_k"),
    ("q4_k_m", "down"): ("q6_k", 0, "q6_k"),
    ("q5_k_m", "down"): ("q6_k", 0, "q6_k"),
    ("q4_0", "down"): ("q4_1", 0, "q4_1"),
    ("q5_0", "down"): ("q5_1", 0, "q5_1"),
}
"""Mix and role -> type of the first so many tensors of the role, their number, and type of all others."""
_FILE_MIXES = tuple(name for name in MIXES if not name.startswith("iq"))
"""Mixes that the tools write."""


@dataclass(frozen=True)
class PlannedLayer:
    """A tensor that is quantized, and how: by a scheme, or as a block type."""

    tensor: OriginalTensor
    what: LayerSpec | str
    shape: tuple[int, ...]


def plan_scaled(
    source: DenoiserSource, scheme: LayerSpec, exclude: Sequence[str], layers: Mapping[str, LayerSpec]
) -> dict[str, PlannedLayer]:
    """Return the plan of each layer, by its original name: matrices that ComfyUI-GGUF quantizes, too.

    Args:
        source: The denoiser.
        scheme: Of all layers.
        exclude: Patterns of names of layers that stay in float.
        layers: Pattern -> scheme of some layers.

    Raises:
        ConfigError: A pattern matches no layer, or there is nothing to quantize.
        NotSupportedError: ComfyUI has no format for a scheme.
        ShapeError: Groups of a scheme do not divide a layer.
    """
    for spec in (scheme, *layers.values()):
        format_of(spec)
    found = _planned(source, exclude, layers, lambda name: scheme, shaped=False)
    for name, layer in found.items():
        assert isinstance(layer.what, LayerSpec)
        check_shape(name, layer.shape, layer.what)
    return found


def plan_blocks(
    source: DenoiserSource, mix: str, exclude: Sequence[str], layers: Mapping[str, str]
) -> dict[str, PlannedLayer]:
    """The block type that each layer gets, by its original name. Takes and raises what `plan_scaled` does.

    Raises:
        NotSupportedError: A mix that the tools do not write.
    """
    for name in (mix, *layers.values()):
        if name not in _FILE_MIXES:
            raise NotSupportedError(
                f"ComfyUI-GGUF takes no denoiser in {name}. Possible: {', '.join(_FILE_MIXES)}; or, in a safetensors "
                f"file, {POSSIBLE.partition(';')[0]}."
            )
    seen: dict[str, int] = {}

    def chosen(name: str) -> str:
        role = next((role for role, parts in ROLES.items() if any(part in name for part in parts)), "")
        seen[role] = seen.get(role, 0) + 1
        wide, count, rest = _WIDER.get((mix, role), (MIXES[mix].base, 0, MIXES[mix].base))
        return wide if seen[role] <= count else rest

    types = {pattern: MIXES[name].base for pattern, name in layers.items()}
    found = _planned(source, exclude, types, chosen, shaped=True)
    fitted = {name: (plan, fitting_block_type(str(plan.what), plan.shape[1])) for name, plan in found.items()}
    return {name: PlannedLayer(plan.tensor, kind, plan.shape) for name, (plan, kind) in fitted.items() if kind}


def _planned(
    source: DenoiserSource, exclude: Sequence[str], layers: Mapping[str, Any], chosen: Any, shaped: bool
) -> dict[str, PlannedLayer]:
    found = {}
    for tensor in source.tensors:
        shape = tuple(source.like(tensor).shape)
        shape = file_shape(source, tensor) if shaped else shape
        if len(shape) == 2 and not source.kind.stays_float(tensor.name) and math.prod(shape) > SMALL:
            found[tensor.name.removesuffix(".weight")] = (tensor, shape)
    require_matches([*exclude, *layers], found, "--exclude and --layer, which take names of layers in the file")
    if not found:
        raise ConfigError(
            f"There is nothing to quantize: the blocks of this {source.kind.name} have no matrix of more than {SMALL} "
            "values."
        )
    return {
        name: PlannedLayer(tensor, first_match(name, layers) or chosen(tensor.name), shape)
        for name, (tensor, shape) in found.items()
        if not matches_any(name, exclude)
    }


def file_shape(source: DenoiserSource, tensor: OriginalTensor) -> tuple[int, ...]:
    """The shape of a tensor in a GGUF file."""
    like = source.like(tensor)
    shape, count = tuple(like.shape), like.numel()
    if not source.kind.is_unet or like.ndim < 2 or count < SHAPED or count % COLUMNS or not shape[-1] % COLUMNS:
        return shape
    return count // COLUMNS, COLUMNS
