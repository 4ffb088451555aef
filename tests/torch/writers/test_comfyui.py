"""Files for ComfyUI: the names of diffusers' own converters, read backwards; values as a decoder of its layout has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quark.core.quantize import fake_quantize
from quark.core.schemes import SCHEMES
from quark.core.spec import block_spec
from quark.errors import FormatError, NotSupportedError
from quark.torch.calibration.calibrate import tensor_qparams
from quark.torch.writers.comfyui.names import kind_of_class, kind_of_file, kinds, original_tensors
from quark.torch.writers.comfyui.scaled_layers import padded, stored
from quark.torch.writers.comfyui.source import open_denoiser
from tests.commands.program import quark
from tests.models.denoisers import denoiser

CHECKPOINT, MODEL = "convert_{}_transformer_checkpoint_to_diffusers", "convert_{}_transformer_to_diffusers"
UNET = {
    "block_out_channels": (32, 64, 64), "layers_per_block": 2, "cross_attention_dim": 32,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
SDXL = UNET | {
    "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64,
    "use_linear_projection": True, "transformer_layers_per_block": (1, 1, 2),
}  # fmt: skip
CLASSES: dict[str, tuple[str, dict[str, Any], str]] = {
    "flux": ("FluxTransformer2DModel", {"num_layers": 2, "num_single_layers": 1, "guidance_embeds": True}, CHECKPOINT),
    "sd3": (
        "SD3Transformer2DModel", {"num_layers": 3, "dual_attention_layers": (0,), "qk_norm": "rms_norm"}, CHECKPOINT
    ),
    "auraflow": ("AuraFlowTransformer2DModel", {"num_mmdit_layers": 1, "num_single_dit_layers": 2}, CHECKPOINT),
    "ltx": ("LTXVideoTransformer3DModel", {"num_layers": 2}, CHECKPOINT),
    "hunyuan_video": (
        "HunyuanVideoTransformer3DModel", {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 2}, MODEL
    ),
    "wan": ("WanTransformer3DModel", {"num_layers": 2, "image_dim": 1280, "added_kv_proj_dim": 5120}, MODEL),
    "lumina2": ("Lumina2Transformer2DModel", {"num_layers": 2}, "convert_{}_to_diffusers"),
    "z_image": ("ZImageTransformer2DModel", {"n_layers": 2}, CHECKPOINT),
    "qwen_image": ("QwenImageTransformer2DModel", {"num_layers": 2}, ""),
    "sd1": ("UNet2DConditionModel", UNET, "convert_ldm_unet_checkpoint"),
    "sdxl": ("UNet2DConditionModel", SDXL, "convert_ldm_unet_checkpoint"),
}  # fmt: skip
"""Class, config, and the function of diffusers that makes its names of those of the authors."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if i else ()) for i, name in enumerate(CLASSES)]
)
def test_diffusers_makes_its_names_of_ours_again(family: str) -> None:
    """Its converters split rows where the real models do: only these are kept, in columns of one value."""
    diffusers: Any = pytest.importorskip("diffusers")
    utils: Any = pytest.importorskip("diffusers.loaders.single_file_utils")
    name, config, converter = CLASSES[family]
    with torch.device("meta"):
        model = getattr(diffusers, name)(**config)
    tensors = {key: torch.randn((x.shape[0], 1) if x.ndim else ()) for key, x in model.state_dict().items()}
    kind = kind_of_class(name, tensors)
    made = {one.name: one.of([tensors[part] for part in one.parts]) for one in original_tensors(kind, tensors)}
    assert kind_of_file(made) is kind and sum(not kind.stays_float(key) for key in made) > 8
    prefix = "model.diffusion_model." if "ldm" in converter else ""
    made = {prefix + key: x for key, x in made.items()}
    back = getattr(utils, converter.format(family))(made, config=dict(model.config)) if converter else made
    back = {key: x for key, x in back.items() if x is not None}
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[key], x) for key, x in tensors.items())


def test_a_tensor_of_several_is_made_of_all_of_them_and_alike() -> None:
    kind = kind_of_class("SD3Transformer2DModel", ())
    names = [f"transformer_blocks.0.attn.to_{part}.weight" for part in "qkv"]
    (whole,) = original_tensors(kind, names)
    shapes = {name: torch.empty(8, 4, device="meta") for name in names}
    assert whole.like(shapes).shape == (24, 4)
    for odd in (torch.empty(8, 5, device="meta"), torch.empty(8, 4, dtype=torch.float16, device="meta")):
        with pytest.raises(FormatError, match="to_k.weight is .* which is not joined to"):
            whole.like({**shapes, names[1]: odd})
    with pytest.raises(FormatError, match="made of 3 tensors, of which 2 are there"):
        original_tensors(kind, names[1:])


def test_a_tensor_without_a_name_is_refused() -> None:
    kind = next(kind for kind in kinds() if kind.name == "flux")
    with pytest.raises(NotSupportedError, match=r"transformer_blocks.0.odd.weight: ComfyUI's name"):
        original_tensors(kind, ["transformer_blocks.0.odd.weight"])
    with pytest.raises(NotSupportedError, match="OddModel: the names .* Possible: AuraFlow"):
        kind_of_class("OddModel", [])
    with pytest.raises(NotSupportedError, match="of no denoiser .* Possible: flux"):
        kind_of_file(["odd.weight"])


def flux(path: Path, width: int = 96, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A file with the names of FLUX's authors, as a part of a whole checkpoint."""
    torch.manual_seed(0)
    block, made = "double_blocks.0.img_", {"img_in.weight": torch.randn(width, 64)}
    made |= {f"{block}attn.qkv.weight": torch.randn(3 * width, width), f"{block}attn.qkv.bias": torch.randn(3 * width)}
    made |= {
        f"{block}attn.proj.weight": torch.randn(width, width),
        f"{block}mlp.2.weight": torch.randn(width, 4 * width),
    }
    made |= {f"{block}attn.norm.query_norm.scale": torch.randn(24)}
    made = {name: x.to(dtype) for name, x in made.items()}
    whole = {f"model.diffusion_model.{name}": x for name, x in made.items()} | {"vae.x": torch.ones(2)}
    save_file(whole, path)
    return made


# ComfyUI's side: comfy/ops.py `_load_quantized_module`, and the layouts of comfy-kitchen, in NumPy.


def unswizzled(scales: np.ndarray[Any, Any], rows: int, columns: int) -> np.ndarray[Any, Any]:
    """cuBLAS: tiles of 128 x 4, and in a tile row r at 16 * (r % 32) + 4 * (r // 32)."""
    flat, tiles = scales.reshape(-1), -(-columns // 4)
    r, c = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    return flat[(r // 128 * tiles + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]


def as_array(x: torch.Tensor) -> np.ndarray[Any, Any]:
    if x.dtype == torch.float8_e4m3fn:
        return x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return x.numpy()


def decoded(layer: dict[str, torch.Tensor], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    said = json.loads(layer["comfy_quant"].numpy().tobytes())
    codes, scale = as_array(layer["weight"]), as_array(layer["weight_scale"])
    if said["format"] in ("float8_e4m3fn", "int8_tensorwise"):
        return codes.astype(np.float32) * scale
    if said["format"] == "nvfp4":
        nibbles = np.stack([codes >> 4, codes & 15], -1).reshape(codes.shape[0], -1).astype(np.uint8)
        codes = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    group = {"nvfp4": 16, "mxfp8": 32}[said["format"]]
    each = unswizzled(scale, codes.shape[0], codes.shape[1] // group)
    if said["format"] == "mxfp8":
        each = 2.0 ** (each.astype(np.float32) - 127)
    else:
        each = each * layer["weight_scale_2"].numpy()
    return (codes * np.repeat(each, group, 1))[: shape[0], : shape[1]]


FORMATS = {
    "fp8_wo": {"format": "float8_e4m3fn", "full_precision_matrix_mult": True},
    "int8_wo": {"format": "int8_tensorwise", "full_precision_matrix_mult": True},
    "int8_dynamic": {"format": "int8_tensorwise"},
    "mxfp8_e4m3": {"format": "mxfp8"},
    "nvfp4": {"format": "nvfp4"},
}


@pytest.mark.parametrize("scheme", FORMATS)
def test_comfyui_decodes_the_values_of_the_quantized_model(scheme: str) -> None:
    """Of a matrix that is no whole number of tiles in either direction, and of more than one."""
    torch.manual_seed(1)
    spec, x = SCHEMES[scheme], torch.randn(150, 200, dtype=torch.bfloat16)
    assert spec.weight is not None
    whole = padded(x, spec)
    params = tensor_qparams(whole, spec.weight)
    layer = stored(whole, params, spec)
    assert json.loads(layer["comfy_quant"].numpy().tobytes()) == FORMATS[scheme]
    wanted = fake_quantize(whole.float(), params, spec.weight)[:150, :200]
    assert np.array_equal(decoded(layer, (150, 200)), wanted.numpy())


@pytest.mark.parametrize("scheme", ["fp8_wo", "nvfp4"])
def test_a_file_for_comfyui_holds_the_layers_of_blocks_quantized(scheme: str, tmp_path: Path) -> None:
    model = flux(tmp_path / "flux.safetensors")
    done = quark(
        "quantize", tmp_path / "flux.safetensors", "--for", "comfyui", "--scheme", scheme, "-o",
        tmp_path / "out.safetensors", "--exclude", "*.proj", "--layer", "*img_mlp.2=int8_dynamic",
    )  # fmt: skip
    assert done.code == 0 and "ComfyUI/models/diffusion_models" in done.out, done.err
    made = load_file(tmp_path / "out.safetensors")
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    layers = {name.removesuffix(".comfy_quant") for name in made if name.endswith(".comfy_quant")}
    assert layers == {"double_blocks.0.img_attn.qkv", "double_blocks.0.img_mlp.2"}
    for name, x in model.items():
        layer = name.removesuffix(".weight")
        if layer not in layers:
            assert torch.equal(made[name], x)
            continue
        spec = SCHEMES["int8_dynamic" if "mlp" in name else scheme]
        assert spec.weight is not None
        parts = {end.removeprefix(f"{layer}."): value for end, value in made.items() if end.startswith(f"{layer}.")}
        wanted = fake_quantize(x.float(), tensor_qparams(x, spec.weight), spec.weight)
        assert np.array_equal(decoded(parts, tuple(x.shape)), wanted.numpy())
    assert not any(name.startswith(("vae", "model.")) for name in made)


def test_a_gguf_file_of_a_denoiser_has_the_types_of_its_tools(tmp_path: Path) -> None:
    model = flux(tmp_path / "flux.safetensors", 256)
    done = quark("quantize", tmp_path / "flux.safetensors", "--scheme", "q4_k_m", "-o", tmp_path / "out.gguf")
    assert done.code == 0, done.err
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    field = reader.get_field("general.architecture")
    assert field is not None and field.contents() == "flux"
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    block = "double_blocks.0.img_"
    assert types == {
        "img_in.weight": "BF16", f"{block}attn.qkv.weight": "Q5_K", f"{block}attn.qkv.bias": "F32",
        f"{block}attn.proj.weight": "Q4_K", f"{block}mlp.2.weight": "Q4_K", f"{block}attn.norm.query_norm.scale": "F32",
    }  # fmt: skip
    for tensor in reader.tensors:
        x, kind = model[tensor.name], tensor.tensor_type.name.lower()
        wanted = x.float()
        if kind.startswith("q"):
            wanted = fake_quantize(wanted, tensor_qparams(x, block_spec(kind)), block_spec(kind))
        assert np.array_equal(gguf.quants.dequantize(tensor.data, tensor.tensor_type), wanted.numpy()), tensor.name


def test_the_weights_of_a_unets_convolutions_are_matrices_in_a_gguf_file(tmp_path: Path) -> None:
    kernel, plain = torch.randn(64, 16, 3, 3), torch.randn(64, 36).half()
    names = {"input_blocks.3.0.op.weight": kernel, "label_emb.0.0.weight": plain, "out.2.bias": torch.randn(4)}
    save_file(names, tmp_path / "sdxl.safetensors")
    done = quark("quantize", tmp_path / "sdxl.safetensors", "--scheme", "q8_0", "-o", tmp_path / "out.gguf")
    assert done.code == 0, done.err
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert {tensor.name: tensor.tensor_type.name for tensor in reader.tensors} == {
        "input_blocks.3.0.op.weight": "Q8_0", "label_emb.0.0.weight": "F16", "out.2.bias": "F32",
    }  # fmt: skip
    shape = reader.get_field("comfy.gguf.orig_shape.input_blocks.3.0.op.weight")
    assert shape is not None and shape.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]
    assert shape.contents() == [64, 16, 3, 3]
    stored_kernel = next(tensor for tensor in reader.tensors if tensor.name.startswith("input"))
    found = gguf.quants.dequantize(stored_kernel.data, stored_kernel.tensor_type).reshape(64, 16, 3, 3)
    assert np.abs(found - kernel.numpy()).max() < 0.02


def test_a_pipeline_and_its_folders_are_read_and_compared_with_their_class(tmp_path: Path) -> None:
    folder = tmp_path / "pipe" / "transformer"
    model = denoiser("flux")
    model.save_pretrained(folder)
    (tmp_path / "pipe" / "model_index.json").write_text('{"transformer": ["diffusers", "FluxTransformer2DModel"]}')
    rows = [getattr(model.transformer_blocks[0].attn, f"to_{part}").weight for part in "qkv"]
    for path in (folder, folder.parent):
        source = open_denoiser(path)
        named = {one.name: one for one in source.tensors}
        assert {"img_in.weight", "double_blocks.0.img_mlp.0.weight"} < {*named}
        assert torch.equal(source.read(named["double_blocks.0.img_attn.qkv.weight"]), torch.cat(rows))
    plan = quark("plan", tmp_path / "pipe", "--for", "comfyui")
    assert plan.code == 0 and "flux: 37 other tensors stay in float" in plan.out, plan.err
    (file,) = folder.glob("*.safetensors")
    whole, name = load_file(file), "transformer_blocks.0.ff.net.2.weight"
    narrow = {**whole, name: whole[name][:, 1:].contiguous()}
    for tensors, said in (
        ({key: x for key, x in whole.items() if key != name}, f"it has no {name}."),
        (narrow, f"{name} has shape (32, 127) in the files, and config.json calls for (32, 128)."),
    ):
        save_file(tensors, file)
        for words in (("plan", "--for", "comfyui"), ("plan", "--scheme", "int8_wo")):
            refused = quark(words[0], folder, *words[1:])
            assert refused.code == 1 and said in refused.err


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (
        ("--for", "comfyui", "--calib", "x.txt", "-o", "a.safetensors"),
        "--calib: a file for ComfyUI is made of the weights",
    ),
    (("--for", "comfyui", "-o", "a"), "the file is called NAME.safetensors"),
    (("--scheme", "mxfp4", "-o", "a.safetensors"), "ComfyUI has no format for .* Possible: fp8_wo"),
    (("--scheme", "iq4_xs", "-o", "a.gguf"), "takes no denoiser in iq4_xs"),
    (("--scheme", "int8_wo", "-o", "a"), "is a file, and becomes one"),
    (("--scheme", "fp8_wo", "--exclude", "odd*", "-o", "a.safetensors"), "odd"),
]


@pytest.mark.parametrize("words, message", REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_what_comfyui_does_not_read_is_refused_before_work(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flux(tmp_path / "flux.safetensors")
    (tmp_path / "x.txt").write_text("x")
    done = quark("quantize", "flux.safetensors", *words)
    assert done.code and (
        message.replace(".*", "") in done.err or all(part in done.err for part in message.split(" .* "))
    )
    assert {path.name for path in tmp_path.iterdir()} == {"flux.safetensors", "x.txt"}
