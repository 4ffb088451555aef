"""Rotary positions in GGUF files: the size and base of rotations, and how frequencies are scaled.

    linear      f / factor                              rope.scaling.type, .factor
    yarn        between f and f / factor, by wavelength  ... and .original_context_length, .yarn_beta_fast, _slow;
                cos and sin times m                     .attn_factor, m / (1 + ln(factor) / 10)
    llama3      f / c, by wavelength                    tensor rope_freqs, c of each frequency
    longrope    f / s; f / l in long contexts           tensors rope_factors_short and rope_factors_long

f = base^(-2i / d) of each of the d / 2 pairs. All frequencies and m are those that transformers computes with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from quark.base.libraries.transformers import rope_function
from quark.gguf.architectures.architecture import Architecture, head_size
from quark.gguf.names import import_gguf

TENSORS = {"llama3": ("ROPE_FREQS",), "longrope": ("ROPE_FACTORS_SHORT", "ROPE_FACTORS_LONG")}
"""Type of scaling -> the tensors, in gguf.MODEL_TENSOR, that a file of it has."""
READERS = {"llama3": ("llama", "llama4", "arcee", "exaone4"), "longrope": ("phi3",)}
"""Type of scaling -> the architectures whose readers take those tensors; the others refuse to load the file."""
_TWO_BASES = ("gemma3",)
"""Architectures whose readers take another base in layers with a sliding window."""
_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
"""The values that a reader takes where a file has no such key."""


def refuse_rope(architecture: Architecture, config: Any) -> str | None:
    """Return the part of a model's rotary scaling that has no place in a file; None where all has."""
    full, *others = _rotations(config)
    kind = _kind(full)
    for other in others:
        if _kind(other) != "default":
            return f"rotary scaling of type {_kind(other)} in layers with a sliding window"
        if other["rope_theta"] != full["rope_theta"] and architecture.arch not in _TWO_BASES:
            return "another rope_theta in layers with a sliding window"
    possible = architecture.arch in READERS[kind] if kind in READERS else kind in ("default", "linear", "yarn")
    if not possible:
        return f"rotary scaling of type {kind}"
    if kind == "yarn" and not full.get("truncate", True):
        return "rotary scaling of type yarn with truncate=False"
    return None


def write_rope(writer: Any, config: Any) -> None:
    """The metadata of rotations. `writer` is a gguf.GGUFWriter."""
    if not getattr(config, "rope_parameters", None):
        return
    gguf = import_gguf()
    full, *others = _rotations(config)
    writer.add_rope_dimension_count(_size(config, full))
    writer.add_rope_freq_base(full["rope_theta"])
    if others:
        writer.add_rope_freq_base_swa(others[0]["rope_theta"])
    kind = _kind(full)
    if kind in ("default", "llama3"):
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    if kind == "linear":
        writer.add_rope_scaling_factor(full["factor"])
        return
    original, attention = full["original_max_position_embeddings"], _scaled(config)[1]
    writer.add_rope_scaling_orig_ctx_len(original)
    if kind == "longrope":
        writer.add_rope_scaling_attn_factors(attention)
        return
    factor = full["factor"] or config.max_position_embeddings / original
    writer.add_rope_scaling_factor(factor)
    if getattr(config, "kv_lora_rank", None):
        # Such readers take both factors, of rotations and of attention, from this one; a tenth of it by convention.
        writer.add_rope_scaling_yarn_log_mul(full.get("mscale_all_dim", 0.0) / 10)
    else:
        # A reader multiplies by this factor of the paper itself.
        writer.add_rope_scaling_attn_factors(attention / (1 + math.log(factor) / 10))
    for name, usual in _YARN_BETAS.items():
        if (full.get(name) or usual) != usual:
            getattr(writer, f"add_rope_scaling_yarn_{name}")(full[name])


def rope_tensors(config: Any) -> Iterator[tuple[str, Callable[[], torch.Tensor], int]]:
    """Name in the file, values and their number, of each tensor of factors by which frequencies are divided."""
    gguf = import_gguf()
    full = _rotations(config)[0]
    for name in TENSORS.get(_kind(full), ()):
        stored = gguf.TENSOR_NAMES[getattr(gguf.MODEL_TENSOR, name)]
        yield f"{stored}.weight", partial(_factors, config, full, name), _size(config, full) // 2


def _factors(config: Any, full: Mapping[str, Any], name: str) -> torch.Tensor:
    if name != "ROPE_FREQS":
        return torch.tensor(full["short_factor" if name.endswith("SHORT") else "long_factor"])
    size = _size(config, full)
    plain = full["rope_theta"] ** -(torch.arange(0, size, 2).double() / size)
    return (plain / _scaled(config)[0].double()).float()


def _scaled(config: Any) -> tuple[torch.Tensor, float]:
    """The frequencies, and by what cos and sin are multiplied."""
    nested = "full_attention" if "full_attention" in config.rope_parameters else None
    kind = _kind(_rotations(config)[0])
    found: tuple[torch.Tensor, float] = rope_function(kind)(config, torch.device("cpu"), layer_type=nested)
    return found


def _rotations(config: Any) -> list[Mapping[str, Any]]:
    """The parameters of all layers; or of those with full attention, then of those with a sliding window."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "full_attention" not in rope:
        return [rope]
    return [rope["full_attention"], *(entry for name, entry in rope.items() if name != "full_attention")]


def _kind(rotation: Mapping[str, Any]) -> str:
    return str(rotation.get("rope_type", "default"))


def _size(config: Any, rotation: Mapping[str, Any]) -> int:
    """Values of a head that are rotated."""
    if getattr(config, "qk_rope_head_dim", None):
        return int(config.qk_rope_head_dim)
    return int(head_size(config) * rotation.get("partial_rotary_factor", 1.0))
