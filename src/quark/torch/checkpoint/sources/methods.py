"""The ways to quantize a folder of which the weights are read as float: what its config says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quark.errors import ConfigError, NotSupportedError
from quark.torch.checkpoint.sources.decode import Tile
from quark.torch.checkpoint.sources.encodings import ENCODINGS
from quark.torch.diffusion.component import is_component

MODELOPT = "modelopt"
READ = ("fp8", "compressed-tensors", "mxfp4", MODELOPT, *ENCODINGS)
"""Values of `quant_method` of folders that are read as float."""
AS_FLOAT = ("mxfp4", MODELOPT, *ENCODINGS)
"""Those of folders that no layer here computes with: a model is loaded as the float one that the codes stand for."""
COMPRESSED = (
    "dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized",
)  # fmt: skip
"""Values of `format` of compressed-tensors that are read."""
ALGORITHMS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES", "NVFP4", "W4A16_NVFP4", "MXFP8",
    "MIXED_PRECISION",
)  # fmt: skip
"""Values of `quant_algo` of ModelOpt that are read: those of vLLM 0.33's modelopt.py. Others scale the inputs, too."""
_IN_BLOCKS = ("FP8_PB_WO", "FP8_BLOCK_SCALES")
"""Those of tiles of 128 x 128, of which the last may be cut."""
_FP4_DTYPES = {"fp8": torch.int8, MODELOPT: torch.uint8}
"""Way -> the type of bytes that hold two values of FP4 each, under the name of the weight."""


def section_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config about how its weights are stored; empty where they are float."""
    stored = config.get("quantization_config") or config.get("compression_config")
    return stored if isinstance(stored, dict) else {}


def method_of(config: dict[str, Any]) -> str | None:
    """The `quant_method` of a config; one name for all of ModelOpt's; None for a float model."""
    method = section_of(config).get("quant_method")
    return MODELOPT if str(method).startswith(MODELOPT) else method


def quantization_of(config: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """The `quantization_config` of a config that can be read. Raises ConfigError or NotSupportedError for others."""
    stored = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(stored, dict):
        return None
    method = method_of(config)
    if method == "quark":
        raise ConfigError(f"{folder} is quantized by quark already; give the model that it was made from.")
    if method not in READ:
        raise NotSupportedError(
            f"{folder} is quantized ({method!r:.40}). Possible: float checkpoints, "
            f"{', '.join(map(repr, READ))}, or the model that it was made from."
        )
    if method in ENCODINGS and is_component(config):
        raise NotSupportedError(
            f"{folder} is a network of diffusers that is quantized ({method!r}). Possible: the float network that it "
            "was made from."
        )
    _check_compressed(stored, folder)
    _check_modelopt(stored, folder)
    return stored


def readable_quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    """The `quantization_config` of a config, where its weights are read as float and are not; else None."""
    return section_of(config) if method_of(config) in READ else None


def _check_compressed(stored: dict[str, Any], folder: Path) -> None:
    """Raise NotSupportedError for what compressed-tensors can say and is not read: the values would be others."""
    groups = [group for group in (stored.get("config_groups") or {}).values() if isinstance(group, dict)]
    forms = {form for form in (stored.get("format"), *(group.get("format") for group in groups)) if form}
    if other := sorted(forms - {*COMPRESSED}) if stored.get("quant_method") == "compressed-tensors" else []:
        raise NotSupportedError(f"{folder}: the format {other[0]!r} is not read. Possible: {', '.join(COMPRESSED)}.")
    sparsity = (stored.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise NotSupportedError(f"{folder}: weights stored as {sparsity!r} are not read. Possible: 'dense'.")
    if (stored.get("transform_config") or {}).get("config_groups"):
        raise NotSupportedError(
            f"{folder}: its weights are rotated for inputs that a runtime rotates (transform_config), and are those of "
            "no float model. Possible: the model that it was made from."
        )


def _check_modelopt(stored: dict[str, Any], folder: Path) -> None:
    """Raise NotSupportedError for an algorithm of ModelOpt that is not read."""
    if not str(stored.get("quant_method")).startswith(MODELOPT):
        return
    layers = stored.get("quantized_layers")
    rows = [stored, *(row for row in (layers if isinstance(layers, dict) else {}).values() if isinstance(row, dict))]
    other = next((name for row in rows if (name := _algorithm(row)) not in ALGORITHMS), None)
    if other is not None:
        raise NotSupportedError(
            f"{folder}: weights quantized by ModelOpt's {other or 'quant_algo (none is given)'} are not supported. "
            f"Possible: {', '.join(ALGORITHMS)}, or the model that it was made from."
        )


def _algorithm(stored: dict[str, Any]) -> str:
    return str(stored.get("quant_algo") or "").upper()


def fp4_dtype(quantization: dict[str, Any] | None) -> torch.dtype | None:
    """The type of stored weights of which each byte holds two values of FP4; None where none are."""
    return _FP4_DTYPES.get(str(method_of({"quantization_config": quantization})))


def tile_of(quantization: dict[str, Any] | None) -> Tile:
    """Rows and columns under a scale, where the config says it and the shape of the scales does not."""
    if quantization is None:
        return Tile()
    if _algorithm(quantization) in _IN_BLOCKS:
        return Tile(128, 128)
    sizes = quantization.get("weight_block_size")
    groups = set()
    for group in (quantization.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        sizes = weights.get("block_structure") if weights.get("strategy") == "block" else sizes
        groups |= {weights.get("group_size")} if weights.get("strategy") in ("group", "tensor_group") else set()
    if isinstance(sizes, str):
        sizes = [int(side) for side in sizes.split("x")]
    if sizes or len(groups) != 1:
        return Tile(*sizes) if sizes else Tile()
    size = groups.pop()
    return Tile(1, size) if isinstance(size, int) and size > 0 else Tile()


def bits_of(quantization: dict[str, Any] | None) -> tuple[int, ...]:
    """The widths of codes that the groups of compressed-tensors name; none of another program."""
    groups = ((quantization or {}).get("config_groups") or {}).values()
    widths = ((group.get("weights") or {}).get("num_bits") for group in groups)
    return tuple(sorted({bits for bits in widths if isinstance(bits, int)}))
