"""Folders as bitsandbytes, torchao and MLX store them, made by NumPy alone, with the values that they stand for.

What the libraries themselves store of one weight is in `record_foreign`; here whole models are needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.models.doors import float_folder
from tests.models.sources import QUANTIZED, Stored

Made = tuple[Stored, np.ndarray]
"""The stored tensors of a weight, by the ends of their names, and its values."""
Encode = Callable[[np.ndarray], Made]
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)  # fmt: skip
"""Of the paper of QLoRA, appendix E."""
BLOCK, SECOND = 64, 256


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def nf4(x: np.ndarray) -> Made:
    """4 bits of bitsandbytes whose scales are quantized, too."""
    blocks = x.reshape(-1, BLOCK)
    absmax = np.abs(blocks).max(1)
    offset = np.float32(absmax.mean())
    levels = np.linspace(-1, 1, 256, dtype=np.float32)
    starts = np.arange(0, len(absmax), SECOND)
    second = np.maximum.reduceat(np.abs(absmax - offset), starts).astype(np.float32)
    seconds = second.repeat(SECOND)[: len(absmax)]
    of_scale = np.abs((absmax - offset)[:, None] / seconds[:, None] - levels).argmin(1).astype(np.uint8)
    scale = levels[of_scale] * seconds + offset
    codes = np.abs(blocks[..., None] / scale[:, None, None] - NF4).argmin(-1)
    state = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": list(x.shape),
             "nested_blocksize": SECOND, "nested_dtype": "float32", "nested_offset": float(offset)}  # fmt: skip
    pairs = codes.reshape(-1, 2).astype(np.uint8)
    parts = {
        "weight": pairs[:, :1] << 4 | pairs[:, 1:],
        "weight.absmax": of_scale,
        "weight.quant_map": NF4.copy(),
        "weight.nested_absmax": second,
        "weight.nested_quant_map": levels.copy(),
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8).copy(),
    }
    return {name: tensor(part) for name, part in parts.items()}, (NF4[codes] * scale[:, None]).reshape(x.shape)


def llm_int8(x: np.ndarray) -> Made:
    """LLM.int8 of bitsandbytes."""
    scale = np.abs(x).max(1).astype(np.float32)
    codes = np.rint(x * 127 / scale[:, None]).astype(np.int8)
    parts = {"weight": tensor(codes), "SCB": tensor(scale), "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes * scale[:, None] / 127


def torchao_int4(x: np.ndarray) -> Made:
    """IntxUnpackedToInt8Tensor of torchao: 4 bits in groups of 32 with zero points."""
    groups = x.reshape(len(x), -1, 32)
    scale = ((groups.max(-1) - groups.min(-1)) / 15).astype(np.float32)
    zero = np.clip(np.rint(-8 - groups.min(-1) / scale), -8, 7).astype(np.int8)
    codes = np.clip(np.rint(groups / scale[..., None]) + zero[..., None], -8, 7).astype(np.int8)
    values = (codes.astype(np.float32) - zero[..., None]) * scale[..., None]
    parts = {"qdata": codes.reshape(x.shape), "scale": scale, "zero_point": zero}
    return {f"_weight_{part}": tensor(stored) for part, stored in parts.items()}, values.reshape(x.shape)


def mlx(x: np.ndarray) -> Made:
    """Affine groups of MLX: 3 bits, groups of 32, a stream of bits in words of 32."""
    groups = x.reshape(len(x), -1, 32)
    bias = groups.min(-1).astype(np.float32)
    scale = ((groups.max(-1) - bias) / 7).astype(np.float32)
    codes = np.rint((groups - bias[..., None]) / scale[..., None]).astype(np.uint8)
    bits = np.unpackbits(codes.reshape(len(x), -1, 1), axis=-1, count=3, bitorder="little").reshape(len(x), -1)
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    values = codes * scale[..., None] + bias[..., None]
    return {"weight": tensor(words), "scales": tensor(scale), "biases": tensor(bias)}, values.reshape(x.shape)


FOREIGN: dict[str, tuple[Encode, dict[str, Any]]] = {
    "bitsandbytes nf4": (nf4, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}),
    "bitsandbytes int8": (llm_int8, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}),
    "torchao": (torchao_int4, {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": {}}}}),
    "mlx": (mlx, {section: {"group_size": 32, "bits": 3} for section in ("quantization", "quantization_config")}),
}
"""Kind -> how a weight is stored, and what config.json says of it."""


def foreign_folder(kind: str, folder: Path, model_type: str = "llama") -> tuple[Path, Stored]:
    """A folder of a small model whose projections are stored so, and the values that they stand for."""
    return folder, encode_folder(kind, float_folder(model_type, folder))


def encode_folder(kind: str, folder: Path) -> Stored:
    """Store the projections of a float folder so; return the values that they stand for."""
    encode, said = FOREIGN[kind]
    tensors, values = load_file(folder / "model.safetensors"), {}
    metadata, rows = {"format": "pt"}, dict[str, Any]()
    for name in [name for name, x in tensors.items() if x.ndim == 2 and QUANTIZED.search(name)]:
        parts, value = encode(tensors.pop(name).float().numpy())
        values[name] = tensor(value)
        tensors |= {f"{name.removesuffix('weight')}{part}": stored for part, stored in parts.items()}
        rows[name] = {"_type": "IntxUnpackedToInt8Tensor", "_data": {
            "block_size": [1, 32], "target_dtype": {"_type": "torch.dtype", "_data": "int4"}}}  # fmt: skip
    if kind == "torchao":
        rows |= {name: {"_type": "Tensor"} for name in tensors if "._weight_" not in name}
        metadata |= {name: json.dumps(row) for name, row in rows.items()} | {"tensor_names": json.dumps([*rows])}
    save_file(tensors, folder / "model.safetensors", metadata)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | said))
    return values
