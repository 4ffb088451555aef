"""Float folders as sources, and the doors through which they are quantized.

Doors: a model in memory, block by block from disk, file to file, the command and the call.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import quark
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.flows.from_disk import stream
from tests.commands.program import quark as program
from tests.models.families import family

SCHEME = "mxfp4"
WIDE = ("e_score_correction_bias", "A_log", ".D", "dt_bias", "norm.weight", "layernorm.weight")
"""Endings of what published folders in bfloat16 hold in float32."""

HYBRID: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1,
              "mamba_d_state": 16},
    "nemotron_h": {"hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "mamba_num_heads": 4,
                   "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "head_dim": 16},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
                     "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
                     "linear_num_value_heads": 4},
}  # fmt: skip
"""Families with state-space or linear attention layers, and experts under other names: their sizes."""


def float_folder(model_type: str, folder: Path) -> Path:
    """A folder in bfloat16 with some tensors in float32, whose values bfloat16 does not hold."""
    model = family(model_type, **HYBRID.get(model_type, {})).to(torch.bfloat16)
    model.save_pretrained(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith(WIDE):
            tensors[name] = 1 + 0.01 * torch.rand(tensor.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def in_memory(source: Path, output: Path) -> None:
    quantizer = ModelQuantizer(LLMTemplate.get("auto").get_config(SCHEME))
    model = load_float_model(OpenedFolder(source), dequantize=True)
    export_safetensors(quantizer.freeze(quantizer.quantize_model(model)), output)


def from_disk(source: Path, output: Path) -> None:
    stream(LLMTemplate.get("auto").get_config(SCHEME), OpenedFolder(source), output)


def file_to_file(source: Path, output: Path) -> None:
    ModelQuantizer(LLMTemplate.get("auto").get_config(SCHEME)).direct_quantize_checkpoint(source, output)


def command(*options: str) -> Callable[[Path, Path], None]:
    def run(source: Path, output: Path) -> None:
        done = program("quantize", source, "-o", output, "--scheme", SCHEME, *options)
        assert done.code == 0, done.err

    return run


def call(source: Path, output: Path) -> None:
    quark.quantize(source, SCHEME, output=output)


DOORS: dict[str, Callable[[Path, Path], None]] = {
    "file to file": file_to_file,
    "from disk": from_disk,
    "command": command(),
    "command, streamed": command("--stream"),
    "command, in memory": command("--no-stream"),
    "call": call,
}


def written(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def same_through_every_door(source: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    in_memory(source, tmp_path / "memory")
    tensors, config = written(tmp_path / "memory")
    for name, door in DOORS.items():
        door(source, tmp_path / name)
        found, said = written(tmp_path / name)
        assert found.keys() == tensors.keys(), name
        for key, tensor in tensors.items():
            assert found[key].dtype == tensor.dtype, (name, key)
            assert torch.equal(found[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), key
        assert said == config, name
    return tensors
