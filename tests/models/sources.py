"""Folders that other programs quantized, as sources, with the float weights that those read there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

from tests.models.doors import float_folder

Stored = dict[str, torch.Tensor]
Encode = Callable[[torch.Tensor], tuple[Stored, torch.Tensor]]
"""A weight -> what is stored of it, by the ends of their names, and the float values that it stands for."""
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", {"num_bits": 4, "group_size": 32, "strategy": "group"}),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                                       "scale_dtype": "torch.float8_e4m3fn"}),
    **{kind: (form, {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32,
                     "scale_dtype": "torch.uint8"})
       for kind, form, bits in (("mxfp4", "mxfp4-pack-quantized", 4), ("mxfp6", "mxfp6-pack-quantized", 6),
                                ("mxfp8", "mxfp8-quantized", 8))},
}  # fmt: skip
"""Kind -> the format of compressed-tensors, and its arguments."""
QUANTIZED = re.compile(r"(proj|\.w[123])\.weight$")
"""In the names of the layers that are stored in codes."""
LARGEST = 6.0
"""Of FP4."""


def fp8_blocks(x: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Codes and scales of 128 x 128 tiles, the last ones cut; and what they stand for."""
    rows, columns = x.shape
    whole = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    whole[:rows, :columns] = x.float()
    tiles = whole.reshape(whole.shape[0] // 128, 128, -1, 128)
    scale = tiles.abs().amax((1, 3)) / 448
    codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    value = (codes.float() * scale[:, None, :, None]).reshape(whole.shape)[:rows, :columns]
    return {"weight": codes.reshape(whole.shape)[:rows, :columns], "weight_scale_inv": scale}, value


def compressed(kind: str, x: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """What the library of the format makes of a weight, and what it reads back."""
    form, arguments = COMPRESSED[kind]
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    blocks = x.float().reshape(x.shape[0], -1, args.group_size or x.shape[1])
    low, high = blocks.amin(-1), blocks.amax(-1)
    state = {"weight": x.float()}
    if kind == "nvfp4":
        state["weight_global_scale"] = generate_gparam(low.min().reshape(1), high.max().reshape(1))
    scale, zero = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state | {"weight_scale": scale, "weight_zero_point": zero}, scheme)
    return stored, compressor.decompress(stored, scheme)["weight"]


def fp4_codes(x: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
    """Bytes of two E2M1 codes each, of groups of so many columns divided by their scales."""
    from tests.fuzz.encoded import FP4

    values = (x.float().reshape(x.shape[0], -1, size) / scale[:, :, None]).reshape(x.shape)
    codes = (values[..., None] - FP4).abs().argmin(-1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def deepseek_fp4(x: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """FP4 in int8 under exponents, of groups of 32, as DeepSeek V4; what transformers reads there."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    amax = x.float().reshape(x.shape[0], -1, 32).abs().amax(-1)
    scale = torch.exp2((amax / LARGEST).log2().ceil()).to(torch.float8_e8m0fnu)
    stored = {"weight": fp4_codes(x, scale.float(), 32).view(torch.int8), "scale": scale}
    return stored, Fp8Dequantize(None)._dequantize_one(stored["weight"], scale, torch.float32)


def modelopt_fp8(x: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """FP8 under one scale, and a scale of the input that is passed over."""
    scale = x.float().abs().amax() / 448
    codes = (x.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, codes.float() * scale


def modelopt_nvfp4(x: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """FP4 under scales in FP8 under one scale; what the library of compressed-tensors reads there, which divides."""
    second = torch.exp2((x.float().abs().amax() / (448 * LARGEST)).log2().ceil())
    scale = (x.float().reshape(x.shape[0], -1, 16).abs().amax(-1) / LARGEST / second).to(torch.float8_e4m3fn)
    codes = fp4_codes(x, scale.float() * second, 16)
    form, arguments = COMPRESSED["nvfp4"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    packed = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": 1 / second.reshape(1)}
    value = BaseCompressor.get_value_from_registry(form).decompress(packed, scheme)["weight"]
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": second, "input_scale": torch.tensor(0.5)}, value


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
OTHERS: dict[str, tuple[Encode, dict[str, Any]]] = {
    "blocks": (fp8_blocks, FP8),
    "fp4": (deepseek_fp4, {**FP8, "scale_fmt": "ue8m0", "expert_dtype": "fp4"}),
    "modelopt fp8": (modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt nvfp4": (modelopt_nvfp4, {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}),
}
"""Kind -> how a weight is stored, and what config.json says of it; ModelOpt says it in a file of its own, too."""
KINDS = (*OTHERS, *COMPRESSED)


def quantized_folder(kind: str, model_type: str, folder: Path) -> tuple[Path, Stored]:
    """A folder whose projections are stored in codes, and the float weights that its library reads there."""
    float_folder(model_type, folder)
    tensors, values = load_file(folder / "model.safetensors"), {}
    fits = {name: x for name, x in tensors.items() if x.ndim == 2 and QUANTIZED.search(name) and x.shape[1] % 32 == 0}
    for name, x in fits.items():
        parts, values[name] = OTHERS[kind][0](x) if kind in OTHERS else compressed(kind, x)
        del tensors[name]
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    said = OTHERS[kind][1] if kind in OTHERS else _said_of(*COMPRESSED[kind])
    if "quantization" in said:
        (folder / "hf_quant_config.json").write_text(json.dumps(said))
    else:
        config["quantization_config"] = said
    (folder / "config.json").write_text(json.dumps(config))
    return folder, values


def _said_of(form: str, arguments: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": arguments, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def mxfp4_experts(folder: Path) -> Stored:
    """Put the experts of a GPT-OSS folder into blocks; return the float tensors that transformers reads there."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, values = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(2)
    for name in [name for name, x in tensors.items() if x.ndim == 3]:
        experts, rows, columns = tensors.pop(name).mT.shape
        shape = (experts, rows, columns // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        exponents = torch.randint(118, 126, shape[:3], dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        values[name] = convert_moe_packed_tensors(blocks, exponents)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def with_further_tokens(source: Path, layer: str, field: str, kind: str = "") -> list[str]:
    """Put a layer that predicts further tokens beside a model: its last layer once more, and what such a layer has.

    Args:
        source: The folder.
        layer: Name of the new layer.
        field: What the config calls the number of such layers.
        kind: "blocks": of a folder whose projections are in FP8.
    """
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    more = {layer + name.removeprefix(last): x.clone() for name, x in tensors.items() if name.startswith(last)}
    size, generator = config["hidden_size"], torch.Generator().manual_seed(3)
    joins = torch.randn(size, 2 * size, generator=generator).to(torch.bfloat16)
    parts = fp8_blocks(joins)[0] if kind else {"weight": joins}
    more |= {f"{layer}eh_proj.{part}": x.contiguous() for part, x in parts.items()}
    more |= {f"{layer}{norm}.weight": torch.rand(size, generator=generator) for norm in ("enorm", "hnorm")}
    save_file(tensors | more, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(config | {field: 1}))
    return sorted(more)
