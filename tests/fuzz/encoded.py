"""Folders of other programs that hold codes, written and read here by torch and NumPy alone: nothing of it is quark's.

FP8 blocks     W = fp8(code) * weight_scale_inv[row // block, column // block]                  DeepSeek V3
packed int4    W = (nibble - 8) * weight_scale[row, column // group], 8 nibbles in an int32     compressed-tensors
MXFP4          W = fp4(nibble) * 2^(scale - 127), 32 values to a scale, two to a byte           GPT-OSS
nf4            W = table[nibble] * absmax[i // 64] of the flattened weight, the higher nibble first  bitsandbytes
FP8            W = fp8(code) * weight_scale                                                     ModelOpt
NVFP4          W = fp4(nibble) * fp8(weight_scale[row, column // 16]) * weight_scale_2          ModelOpt
affine         W = code * scales[row, column // group] + biases[row, column // group], 8 nibbles in a uint32      MLX
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
BLOCK, GROUP = 32, 32
FP8 = torch.float8_e4m3fn
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.tensor([-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
                    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0])  # fmt: skip
NF4_BLOCK, NVFP4_GROUP = 64, 16
FP8_MOST = 448
FILE = "model.safetensors"


def _spread(scale: torch.Tensor, shape: torch.Size, rows: int, columns: int) -> torch.Tensor:
    """A scale for each value, of those of blocks."""
    return scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., : shape[-2], : shape[-1]]


def to_blocks(name: str, x: torch.Tensor) -> Tensors:
    rows, columns = (-(-size // BLOCK) for size in x.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: x.shape[0], : x.shape[1]] = x
    scale = padded.reshape(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)).clamp_min(1e-12) / FP8_MOST
    return {name: (x / _spread(scale, x.shape, BLOCK, BLOCK)).to(FP8), f"{name}_scale_inv": scale}


def of_blocks(name: str, held: Tensors, config: dict[str, Any]) -> torch.Tensor:
    codes, scale, (rows, columns) = held[name], held[f"{name}_scale_inv"], config["weight_block_size"]
    assert codes.dtype == FP8
    assert tuple(scale.shape) == (-(-codes.shape[0] // rows), -(-codes.shape[1] // columns))
    return codes.float() * _spread(scale.float(), codes.shape, rows, columns)


def to_packed(name: str, x: torch.Tensor) -> Tensors:
    scale = (x.reshape(len(x), -1, GROUP).abs().amax(-1) / 7).clamp_min(1e-12)
    codes = (x / _spread(scale, x.shape, 1, GROUP)).round().clamp(-8, 7).to(torch.int64) + 8
    packed = (codes.reshape(len(x), -1, 8) << torch.arange(0, 32, 4)).sum(-1).numpy().astype(np.uint32)
    parts = {"packed": torch.from_numpy(packed.view(np.int32)), "scale": scale, "shape": torch.tensor(x.shape)}
    return {f"{name}_{part}": tensor for part, tensor in parts.items()}


def of_packed(name: str, held: Tensors, config: dict[str, Any]) -> torch.Tensor:
    packed, scale = held[f"{name}_packed"], held[f"{name}_scale"]
    weights = next(iter(config["config_groups"].values()))["weights"]
    assert packed.dtype == torch.int32 and weights["num_bits"] == 4
    whole = torch.tensor([len(packed), 8 * packed.shape[1]])  # 4 bits leave nothing over
    shape = torch.Size(held.get(f"{name}_shape", whole).tolist())
    codes = (packed.numpy().view(np.uint32)[..., None] >> np.arange(0, 32, 4, np.uint32)) & 15
    values = torch.from_numpy(codes.astype(np.float32)).reshape(shape) - 8
    assert tuple(scale.shape) == (shape[0], shape[1] // weights["group_size"])
    return values * _spread(scale.float(), shape, 1, weights["group_size"])


def to_mxfp4(name: str, x: torch.Tensor) -> Tensors:
    parts = x.transpose(1, 2).reshape(len(x), x.shape[2], -1, 32)
    power = parts.abs().amax(-1).clamp_min(1e-12).log2().floor() - 2
    codes = ((parts / power.exp2()[..., None])[..., None] - FP4).abs().argmin(-1).to(torch.uint8)
    return {f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4, f"{name}_scales": (power + 127).to(torch.uint8)}


def of_mxfp4(name: str, held: Tensors, config: dict[str, Any]) -> torch.Tensor:
    blocks, scales = held[f"{name}_blocks"], held[f"{name}_scales"]
    assert blocks.dtype == scales.dtype == torch.uint8 and blocks.shape == (*scales.shape, 16)
    values = FP4[torch.stack([blocks & 15, blocks >> 4], -1).long()].flatten(-2)
    return (values * (scales.float() - 127).exp2()[..., None]).flatten(2).transpose(1, 2).contiguous()


def to_nf4(name: str, x: torch.Tensor) -> Tensors:
    blocks = x.reshape(-1, NF4_BLOCK)
    absmax = blocks.abs().amax(1).clamp_min(1e-12)
    codes = (blocks[..., None] / absmax[:, None, None] - NF4).abs().argmin(-1).reshape(-1, 2).to(torch.uint8)
    state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": "float32", "shape": list(x.shape)}
    described = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts = {".absmax": absmax, ".quant_map": NF4.clone(), ".quant_state.bitsandbytes__nf4": described}
    return {name: codes[:, :1] << 4 | codes[:, 1:], **{f"{name}{part}": tensor for part, tensor in parts.items()}}


def of_nf4(name: str, held: Tensors, config: dict[str, Any]) -> torch.Tensor:
    state = json.loads(bytes(held[f"{name}.quant_state.bitsandbytes__nf4"].flatten().tolist()))
    absmax, packed = held[f"{name}.absmax"], held[name].reshape(-1).view(torch.uint8)
    size, shape = state["blocksize"], state["shape"]
    assert state["quant_type"] == "nf4" and absmax.dtype == torch.float32 and 2 * packed.numel() == np.prod(shape)
    assert absmax.numel() == -(-2 * packed.numel() // size)
    values = NF4[torch.stack([packed >> 4, packed & 15], -1).flatten().long()]
    return (values * absmax.repeat_interleave(size)[: values.numel()]).reshape(shape)


def to_mlx(name: str, x: torch.Tensor) -> Tensors:
    groups = x.reshape(len(x), -1, GROUP)
    biases, scales = groups.amin(-1), ((groups.amax(-1) - groups.amin(-1)) / 15).clamp_min(1e-12)
    codes = ((groups - biases[..., None]) / scales[..., None]).round().clamp(0, 15).to(torch.int64)
    packed = (codes.reshape(len(x), -1, 8) << torch.arange(0, 32, 4)).sum(-1).numpy().astype(np.uint32)
    layer = name.removesuffix("weight")
    return {name: torch.from_numpy(packed), f"{layer}scales": scales, f"{layer}biases": biases}


def of_mlx(layer: str, held: Tensors, config: dict[str, Any]) -> torch.Tensor:
    packed, scales, biases = (held[f"{layer}{part}"] for part in ("weight", "scales", "biases"))
    assert packed.dtype == torch.uint32 and config["bits"] == 4 and config.get("mode", "affine") == "affine"
    assert scales.shape == biases.shape == (len(packed), packed.shape[1] * 8 // config["group_size"])
    assert scales.is_floating_point() and biases.is_floating_point()
    codes = (packed.numpy()[..., None] >> np.arange(0, 32, 4, np.uint32)) & 15
    values = torch.from_numpy(codes.astype(np.float32)).reshape(len(packed), -1, config["group_size"])
    return (values * scales.float()[..., None] + biases.float()[..., None]).flatten(1)


def to_modelopt_fp8(name: str, x: torch.Tensor) -> Tensors:
    scale = x.abs().amax() / FP8_MOST
    beside = {f"{name}_scale": scale, f"{name.removesuffix('weight')}input_scale": torch.tensor(0.5)}
    return {name: (x / scale).to(FP8), **beside}


def of_modelopt_fp8(layer: str, held: Tensors, config: dict[str, Any]) -> torch.Tensor:
    codes, scale = held[f"{layer}weight"], held[f"{layer}weight_scale"]
    assert codes.dtype == FP8 and scale.numel() == 1 and _is_value(scale)
    _require_live(layer, held)
    return codes.float() * scale.float().reshape(())


def to_modelopt_nvfp4(name: str, x: torch.Tensor) -> Tensors:
    groups = x.reshape(len(x), -1, NVFP4_GROUP)
    second = groups.abs().amax() / (6 * FP8_MOST)
    scale = (groups.abs().amax(-1) / 6 / second).to(FP8)
    values = (groups / (scale.float() * second)[..., None]).nan_to_num(0).reshape(x.shape)
    codes = (values[..., None] - FP4).abs().argmin(-1).to(torch.uint8)
    beside = {f"{name}_scale": scale, f"{name}_scale_2": second}
    beside[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.5)
    return {name: codes[..., ::2] | codes[..., 1::2] << 4, **beside}


def of_modelopt_nvfp4(layer: str, held: Tensors, config: dict[str, Any]) -> torch.Tensor:
    codes, scale, second = (held[f"{layer}weight{part}"] for part in ("", "_scale", "_scale_2"))
    assert codes.dtype == torch.uint8 and scale.dtype == FP8 and second.numel() == 1 and _is_value(second)
    assert scale.shape == (len(codes), codes.shape[1] * 2 // NVFP4_GROUP)
    _require_live(layer, held)
    values = FP4[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    return values * scale.float().repeat_interleave(NVFP4_GROUP, -1) * second.float().reshape(())


def _is_value(x: torch.Tensor) -> bool:
    return x.is_floating_point() and x.itemsize > 1


def _require_live(layer: str, held: Tensors) -> None:
    """The scale of the inputs, where there is one, scales nothing here, and has to be a scale."""
    x = held.get(f"{layer}input_scale", torch.ones(()))
    assert _is_value(x) and bool((x.isfinite() & (x >= 0)).all())


@dataclass(frozen=True)
class Encoding:
    """How a folder holds codes.

    Attributes:
        base: Float folder that it is made of.
        config: Its `quantization_config`.
        chosen: Whether a tensor of the float folder is held in codes.
        encode, decode: Of one tensor, by its name.
        parts: Ends of the names of what belongs to a tensor in codes, behind that of the float one but for its `end`.
        end: Of the name of the float tensor, where names of parts go without it.
    """

    base: str
    config: dict[str, Any]
    chosen: Callable[[str], bool]
    encode: Callable[[str, torch.Tensor], Tensors]
    decode: Callable[[str, Tensors, dict[str, Any]], torch.Tensor]
    parts: tuple[str, ...]
    end: str = ""


def _linear(name: str) -> bool:
    return name.endswith("_proj.weight")


ENCODINGS = {
    "encoded-blocks": Encoding(
        "llama",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
        _linear, to_blocks, of_blocks, ("_scale_inv",),
    ),
    "encoded-packed": Encoding(
        "llama",
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
         "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
             "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}}}},
        _linear, to_packed, of_packed, ("_packed", "_scale", "_shape"),
    ),
    "encoded-nf4": Encoding(
        "llama", {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        _linear, to_nf4, of_nf4, (".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4"),
    ),
    "encoded-mlx": Encoding(
        "llama", {"group_size": GROUP, "bits": 4, "mode": "affine"},
        _linear, to_mlx, of_mlx, ("scales", "biases", "weight"), "weight",
    ),
    "encoded-modelopt-fp8": Encoding(
        "llama", {"quant_method": "modelopt", "quant_algo": "FP8"},
        _linear, to_modelopt_fp8, of_modelopt_fp8, ("weight_scale", "input_scale", "weight"), "weight",
    ),
    "encoded-modelopt-nvfp4": Encoding(
        "llama", {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": NVFP4_GROUP},
        _linear, to_modelopt_nvfp4, of_modelopt_nvfp4, ("weight_scale", "weight_scale_2", "input_scale", "weight"),
        "weight",
    ),
    "encoded-mxfp4": Encoding(
        "gpt_oss",
        {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
        lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj")),
        to_mxfp4, of_mxfp4, ("_blocks", "_scales"),
    ),
}  # fmt: skip


def write_encoded(folder: Path, source: Path, name: str) -> None:
    """A float folder in the codes of an encoding."""
    row = ENCODINGS[name]
    shutil.copytree(source, folder)
    held: Tensors = {}
    for key, x in load_file(source / FILE).items():
        held |= row.encode(key, x.float()) if row.chosen(key) else {key: x}
    save_file(held, folder / FILE, metadata={"format": "pt"})
    _change_config(folder, lambda config: {**config, "quantization_config": row.config})


def decode_folder(source: Path, folder: Path, name: str) -> Path:
    """The float folder that codes stand for. Raises what torch and NumPy raise where they stand for nothing."""
    row = ENCODINGS[name]
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    shutil.copytree(source, folder)
    held = load_file(source / FILE)
    coded = [key.removesuffix(row.parts[0]) for key in held if key.endswith(row.parts[0])]
    parts = {f"{key}{part}" for key in coded for part in ("", *row.parts)}
    floats = {key: x for key, x in held.items() if key not in parts}
    floats |= {f"{key}{row.end}": row.decode(key, held, config) for key in coded}
    save_file({key: x.contiguous() for key, x in floats.items()}, folder / FILE, metadata={"format": "pt"})
    _change_config(folder, lambda config: {k: v for k, v in config.items() if k != "quantization_config"})
    return folder


def _change_config(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text(encoding="utf-8")))), encoding="utf-8")
