"""Files for ComfyUI: the names of diffusers' own converters, read backwards; values as a decoder of its layout has."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

from quark.core.quantize import fake_quantize
from quark.core.schemes import SCHEMES
from quark.core.spec import block_spec
from quark.errors import FormatError, NotSupportedError
from quark.torch import ModelQuantizer
from quark.torch.calibration.calibrate import tensor_qparams
from quark.torch.config.named_algorithms import algo_config_by_name
from quark.torch.model.calibration_data.stored_batches import write_batch
from quark.torch.writers.comfyui.names import OriginalTensor, kind_of_class, kind_of_file, kinds, original_tensors
from quark.torch.writers.comfyui.plan import PlannedLayer, plan_scaled
from quark.torch.writers.comfyui.scaled_layers import padded, stored
from quark.torch.writers.comfyui.solved import SolvedDenoiser, config_for, join_layers
from quark.torch.writers.comfyui.source import open_denoiser
from quark.torch.writers.comfyui.write import write_scaled
from tests.commands.program import quark
from tests.models.denoisers import denoiser, output, step

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
    with pytest.raises(FormatError, match="needs 3 tensors, but the file has 2 of them"):
        original_tensors(kind, names[1:])


def test_a_tensor_without_a_name_is_refused() -> None:
    kind = next(kind for kind in kinds() if kind.name == "flux")
    with pytest.raises(NotSupportedError, match=r"transformer_blocks.0.odd.weight: ComfyUI's name"):
        original_tensors(kind, ["transformer_blocks.0.odd.weight"])
    with pytest.raises(NotSupportedError, match="OddModel: the names .* Possible: AuraFlow"):
        kind_of_class("OddModel", [])
    with pytest.raises(NotSupportedError, match="none of the known denoisers.* Possible: flux"):
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


@pytest.mark.parametrize("form", ["raw", "scale_weight", "weight_scale"])
def test_a_file_in_fp8_is_read_as_its_codes_times_their_scale(form: str, tmp_path: Path) -> None:
    floats, files = flux(tmp_path / "float.safetensors"), ("fp8.safetensors", "same.safetensors")
    stored, values = dict(floats), dict(floats)
    for name, x in floats.items():
        if x.ndim < 2:
            continue
        scale = torch.tensor(1.0 if form == "raw" else float(x.abs().max()) / 448)
        stored[name] = (x.float() / scale).to(torch.float8_e4m3fn)
        values[name] = (stored[name].float() * scale).bfloat16()
        layer = name.removesuffix("weight")
        if form != "raw":
            other = "scale_input" if form == "scale_weight" else "input_scale"
            stored |= {f"{layer}{form}": scale, f"{layer}{other}": torch.ones(1)}
    if form == "scale_weight":
        stored["scaled_fp8"] = torch.empty(2, dtype=torch.float8_e4m3fn)
    for file, tensors in zip(files, (stored, values), strict=True):
        save_file(tensors, tmp_path / file)
        done = quark("quantize", tmp_path / file, "--scheme", "int8_wo", "-o", tmp_path / f"out-{file}")
        assert done.code == 0, done.err
    made, wanted = (load_file(tmp_path / f"out-{file}") for file in files)
    assert made.keys() == wanted.keys() and all(torch.equal(made[name], x) for name, x in wanted.items())
    weight = next(name for name, x in stored.items() if x.dtype == torch.float8_e4m3fn and name.endswith("weight"))
    save_file(stored | {f"{weight}_scale": torch.ones(2)}, tmp_path / "rows.safetensors")
    with pytest.raises(NotSupportedError, match="one float scale for each tensor"):
        open_denoiser(tmp_path / "rows.safetensors")
    done = quark("convert", tmp_path / files[0], "-o", tmp_path / "floats.safetensors")
    assert done.code == 0, done.err
    made = load_file(tmp_path / "floats.safetensors")
    assert made.keys() == values.keys() and all(torch.equal(made[name], x) for name, x in values.items())
    done = quark("convert", tmp_path / files[0], "--dtype", "float32", "-o", tmp_path / "wide.safetensors")
    scale = stored.get(f"{weight.removesuffix('weight')}{form}", torch.ones(()))
    assert torch.equal(load_file(tmp_path / "wide.safetensors")[weight], stored[weight].float() * scale)


def test_a_file_in_fp8_is_converted_or_the_way_is_named(tmp_path: Path) -> None:
    weight = torch.arange(16.0).reshape(4, 4)
    fp8 = {"model.x.weight": weight.to(torch.float8_e5m2), "model.x.bias": torch.ones(4, dtype=torch.float16)}
    files = {
        "fp8": fp8 | {"model.scaled_fp8": torch.empty(0, dtype=torch.float8_e5m2)},
        "float": {"x.weight": weight},
        "int8": fp8 | {"y.weight": weight.to(torch.int8), "y.weight_scale": torch.ones(1)},
    }
    for name, tensors in files.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    out = tmp_path / "out.safetensors"
    for name, options, said in (
        ("fp8", ["-o", tmp_path / "folder"], "Possible: -o .*folder.safetensors,"),
        ("fp8", ["--format", "quark", "-o", out], "quark quantize .* --for comfyui"),
        ("fp8", ["--requantize", "int8", "-o", out], "quark quantize .* --for comfyui"),
        ("float", ["-o", out], "no weight is in FP8"),
        ("int8", ["-o", out], "y.weight_scale describes a weight that is not in FP8"),
    ):
        done = quark("convert", tmp_path / f"{name}.safetensors", *options)
        assert done.code == 1 and re.search(said, done.err), done.err
    assert {path.stem for path in tmp_path.iterdir()} == set(files)
    said = re.search("Possible: -o ([^,]*),", quark("convert", tmp_path / "fp8.safetensors", "-o", tmp_path).err)
    assert said is not None and quark("convert", tmp_path / "fp8.safetensors", "-o", said[1]).code == 0
    made = load_file(said[1])
    assert {name: x.dtype for name, x in made.items()} == dict.fromkeys(fp8, torch.float16)
    assert torch.equal(made["model.x.weight"], fp8["model.x.weight"].half())


@pytest.mark.parametrize(("name", "dtype"), [("attn.qkv.bias", None), ("attn.proj.weight", torch.float8_e4m3fn)])
def test_values_that_are_no_numbers_reach_no_file(name: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    tensors = flux(tmp_path / "float.safetensors")
    full = f"double_blocks.0.img_{name}"
    wrong = tensors[full].float()
    wrong.view(-1)[0] = torch.nan
    save_file(tensors | {full: wrong.to(dtype or torch.bfloat16)}, tmp_path / "wrong.safetensors")
    done = quark("quantize", tmp_path / "wrong.safetensors", "--scheme", "int8_wo", "-o", tmp_path / "out.safetensors")
    assert done.code == 1 and full in done.err and done.err.count("\n") == 1, done
    assert not (tmp_path / "out.safetensors").exists()


# ComfyUI's side: comfy/ops.py `_load_quantized_module`, and the layouts of comfy-kitchen, in NumPy.


def test_integers_in_place_of_a_bias_are_refused(tmp_path: Path) -> None:
    tensors = flux(tmp_path / "flux.safetensors")
    name = next(name for name in tensors if name.endswith(".bias"))
    save_file(tensors | {name: tensors[name].view(torch.int16)}, tmp_path / "wrong.safetensors")
    with pytest.raises(FormatError, match=r"bias is torch\.int16, and such tensors of a denoiser are floats"):
        open_denoiser(tmp_path / "wrong.safetensors")


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
    codes, scale = as_array(layer["weight"]), layer["weight_scale"]
    scale = as_array(scale.float() if scale.dtype == torch.bfloat16 else scale)
    if said["format"] in ("float8_e4m3fn", "int8_tensorwise"):
        return codes.astype(np.float32) * scale
    if said["format"] == "awq_w4a16":
        nibbles = np.stack([codes.view(np.uint8) & 15, codes.view(np.uint8) >> 4], -1).reshape(codes.shape[0], -1)
        zeros, size = as_array(layer["weight_zeros"].float()), said["group_size"]
        return (nibbles - 8.0) * np.repeat(scale.T, size, 1) + np.repeat(zeros.T, size, 1)
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
    "int4_wo_32": {"format": "awq_w4a16", "group_size": 32},
}


@pytest.mark.parametrize("scheme", FORMATS)
def test_comfyui_decodes_the_values_of_the_quantized_model(scheme: str) -> None:
    """Of a matrix that is no whole number of tiles in either direction, and of more than one; of groups, of 32."""
    torch.manual_seed(1)
    columns = 224 if scheme == "int4_wo_32" else 200
    spec, x = SCHEMES[scheme], torch.randn(150, columns, dtype=torch.bfloat16)
    assert spec.weight is not None
    whole = padded(x, spec)
    params = tensor_qparams(whole, spec.weight)
    layer = stored(whole, params, spec)
    assert json.loads(layer["comfy_quant"].numpy().tobytes()) == FORMATS[scheme]
    wanted = fake_quantize(whole.float(), params, spec.weight)[:150, :columns]
    assert np.array_equal(decoded(layer, (150, columns)), wanted.numpy())


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
    whole, name = load(file.read_bytes()), "transformer_blocks.0.ff.net.2.weight"
    narrow = {**whole, name: whole[name][:, 1:].contiguous()}
    for tensors, said in (
        ({key: x for key, x in whole.items() if key != name}, f"it has no {name}."),
        (narrow, f"{name} has shape (32, 127) in the files, and config.json calls for (32, 128)."),
    ):
        save_file(tensors, file)
        for words in (("plan", "--for", "comfyui"), ("plan", "--scheme", "int8_wo")):
            refused = quark(words[0], folder, *words[1:])
            assert refused.code == 1 and said in refused.err


def calibrated(name: str, scheme: str, folder: Path, *algorithms: str) -> tuple[SolvedDenoiser, dict[str, Any]]:
    """The network of a row after calibration, and the tensors of its file, both of the package."""
    denoiser(name, torch.bfloat16).save_pretrained(folder / name)
    source = open_denoiser(folder / name)
    spec = SCHEMES[scheme]
    plan = plan_scaled(source, spec, (), {})
    model = denoiser(name, torch.bfloat16)
    names = join_layers(model, plan)
    config = config_for(names, plan, [algo_config_by_name(each) for each in algorithms] or None)
    batches = [step(name, seed, torch.bfloat16) for seed in range(3)]
    solved = SolvedDenoiser.of(ModelQuantizer(config).quantize_model(model, batches), names)
    write_scaled(source, plan, folder / "out.safetensors", False, solved)
    assert solved.layers.keys() == plan.keys()
    return solved, load_file(folder / "out.safetensors")


def as_in_diffusers(name: str, made: dict[str, Any]) -> Any:
    """The network of a row with the values that ComfyUI decodes, under the names of diffusers."""
    model = denoiser(name, torch.bfloat16)
    own = model.state_dict()
    values = {}
    for one in original_tensors(kind_of_class(type(model).__name__, own), own):
        layer = one.name.removesuffix(".weight")
        shape = tuple(one.like({part: own[part] for part in one.parts}).shape)
        if f"{layer}.comfy_quant" in made and one.name.endswith(".weight"):
            parts = {end.removeprefix(f"{layer}."): x for end, x in made.items() if end.startswith(f"{layer}.")}
            whole = torch.tensor(decoded(parts, shape)).bfloat16()
        else:
            whole = made[one.name]
        whole = torch.cat(whole.chunk(2)[::-1]) if one.swapped else whole  # all of even rows
        sizes = [len(own[part]) if own[part].ndim else 1 for part in one.parts]
        values |= {part: x.reshape(own[part].shape) for part, x in zip(one.parts, whole.split(sizes), strict=True)}
    model.load_state_dict(values)
    return model


@pytest.mark.parametrize(
    "name, scheme",
    [
        ("flux", "int4_wo_32"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (
            ("hunyuan", "int8_wo"), ("aura", "fp8_wo"), ("sd3", "int8_wo"), ("lumina", "fp8_wo"), ("ltx", "int8_wo"),
            ("qwen", "fp8_wo"), ("unet", "int8_wo"),
        )),
    ],
)  # fmt: skip
def test_a_file_of_solved_weights_computes_what_the_solved_network_does(name: str, scheme: str, tmp_path: Path) -> None:
    """To the bit, in the float class of diffusers: layers that are one in the file were solved as one."""
    solved, made = calibrated(name, scheme, tmp_path, "gptq")
    batch = step(name, 100, torch.bfloat16)
    found = output(as_in_diffusers(name, made), batch)
    assert torch.equal(found, output(ModelQuantizer.freeze(solved.model), batch))
    plain = output(denoiser(name, torch.bfloat16), batch)
    assert 0 < float((found - plain).norm() / plain.norm()) < 0.1


@pytest.mark.parametrize("scheme", ["fp8", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_scales_of_inputs_are_those_of_all_that_one_layer_reads(scheme: str, tmp_path: Path) -> None:
    _, made = calibrated("flux", scheme, tmp_path)
    largest: dict[str, float] = {}
    model = denoiser("flux", torch.bfloat16)
    own = {
        "double_blocks.0.img_attn.qkv": "transformer_blocks.0.attn.to_k",
        "single_blocks.0.linear1": "single_transformer_blocks.0.proj_mlp",
        "double_blocks.0.txt_mlp.2": "transformer_blocks.0.ff_context.net.2",
    }
    for file, name in own.items():

        def see(_: Any, inputs: Any, file: str = file) -> None:
            largest[file] = max(largest.get(file, 0.0), float(inputs[0].abs().max()))

        model.get_submodule(name).register_forward_pre_hook(see)
    for seed in range(3):
        output(model, step("flux", seed, torch.bfloat16))
    share = {"fp8": 448, "nvfp4": 448 * 6}[scheme]
    for file, most in largest.items():
        assert made[f"{file}.input_scale"].shape == () and made[f"{file}.input_scale"].dtype == torch.float32
        assert float(made[f"{file}.input_scale"]) == pytest.approx(most / share, rel=2**-8), file  # in bfloat16
        assert json.loads(made[f"{file}.comfy_quant"].numpy().tobytes()) == {
            "format": FORMATS.get(scheme, FORMATS["fp8_wo"])["format"]
        }


def test_joined_layers_compute_once_what_they_did_apart(tmp_path: Path) -> None:
    """Of a network that reads the same values in two tensors, and of halves that change places."""
    for name in ("hunyuan", "flux"):
        denoiser(name).save_pretrained(tmp_path / name)
        model, batch = denoiser(name), step(name)
        plan = plan_scaled(open_denoiser(tmp_path / name), SCHEMES["fp8_wo"], (), {})
        wanted, names = output(model, batch), join_layers(model, plan)
        calls: Counter[str] = Counter()
        for own in names.values():
            model.get_submodule(own).register_forward_hook(lambda *_, own=own, calls=calls: calls.update([own]))
        assert torch.allclose(output(model, batch), wanted, atol=1e-6)
        assert sum(own.endswith(".joined") for own in names.values()) >= 3
        assert {*calls.values()} == {1} and calls.keys() == {*names.values()}
    head = torch.nn.Sequential(torch.nn.Linear(3, 4))
    weight = head[0].weight.detach().clone()
    turned = PlannedLayer(OriginalTensor("head.weight", ("0.weight",), swapped=True), SCHEMES["fp8_wo"], (4, 3))
    x = torch.randn(2, 3)
    wanted, names = head(x), join_layers(head, {"head": turned})
    assert torch.equal(head.get_submodule(names["head"]).weight, torch.cat([weight[2:], weight[:2]]))
    assert torch.allclose(head(x), wanted) and torch.equal(head[0].weight, weight)


@pytest.mark.slow
def test_a_calibrated_file_is_made_on_the_command_line(tmp_path: Path) -> None:
    denoiser("flux", torch.bfloat16).save_pretrained(tmp_path / "transformer")
    (tmp_path / "model_index.json").write_text('{"transformer": ["diffusers", "FluxTransformer2DModel"]}')
    (tmp_path / "steps").mkdir()
    for seed in range(2):
        write_batch(tmp_path / "steps" / f"{seed}.npz", step("flux", seed, torch.bfloat16))
    done = quark("plan", tmp_path, "--for", "comfyui", "--scheme", "fp8")
    assert done.code == 0 and "data: needed, and not given (--calib)" in done.out, done.err
    done = quark("quantize", tmp_path, "--for", "comfyui", "--scheme", "fp8", "-o", tmp_path / "a.safetensors")
    assert done.code == 1 and "needs data: pass --calib" in done.err
    for scheme, out in (("fp8", "a.safetensors"), ("q4_0", "a.gguf")):
        done = quark(
            "quantize", tmp_path, "--for", "comfyui", "--scheme", scheme, "--calib", tmp_path / "steps", "-o",
            tmp_path / out,
        )  # fmt: skip
        assert done.code == 0, done.err
    assert "double_blocks.0.img_attn.qkv.input_scale" in load_file(tmp_path / "a.safetensors")
    values = gguf.GGUFReader(tmp_path / "a.gguf").tensors
    source, reader = open_denoiser(tmp_path), {tensor.name: tensor for tensor in values}
    one = next(one for one in source.tensors if one.name == "double_blocks.0.img_attn.qkv.weight")
    x = source.read(one).float()
    nearest = fake_quantize(x, tensor_qparams(x, block_spec("q4_0")), block_spec("q4_0"))
    found = torch.tensor(gguf.quants.dequantize(reader[one.name].data, reader[one.name].tensor_type))
    assert not torch.equal(found, nearest) and float((found - x).norm() / x.norm()) < 0.15  # solved, not to nearest
    for words, said in (
        (("--scheme", "fp8_wo", "--calib", tmp_path / "steps"), "nothing reads it"),
        (("--scheme", "fp8", "--calib", tmp_path / "steps", "--algorithm", "svdquant"), "no place for low-rank"),
        (("--scheme", "fp8_wo", "--samples", "3"), "--samples describes calibration data"),
    ):
        done = quark("plan", tmp_path, "--for", "comfyui", *words)
        assert done.code == 1 and said in done.err, done.err


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (
        ("--for", "comfyui", "--calib", "x.npz", "-o", "a.safetensors"),
        "flux.safetensors is a file, which names no class that could run",
    ),
    (("--for", "comfyui", "-o", "a"), "the file is called NAME.safetensors"),
    (("--scheme", "mxfp4", "-o", "a.safetensors"), "ComfyUI has no format for .* Possible: fp8_wo"),
    (("--scheme", "iq4_xs", "-o", "a.gguf"), "takes no denoiser in iq4_xs"),
    (("--for", "comfyui", "--length", "3", "-o", "a.safetensors"), "--length: not of a file for ComfyUI"),
    (("--scheme", "int4_wo_64", "-o", "a.safetensors"), "rows of 96, which are no whole groups of 64"),
    (("--scheme", "int8_wo", "-o", "a"), "is a file, and becomes one"),
    (("--scheme", "fp8_wo", "--exclude", "odd*", "-o", "a.safetensors"), "odd"),
]


@pytest.mark.parametrize("words, message", REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_what_comfyui_does_not_read_is_refused_before_work(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flux(tmp_path / "flux.safetensors")
    (tmp_path / "x.npz").write_bytes(b"x")
    done = quark("quantize", "flux.safetensors", *words)
    assert done.code and (
        message.replace(".*", "") in done.err or all(part in done.err for part in message.split(" .* "))
    )
    assert {path.name for path in tmp_path.iterdir()} == {"flux.safetensors", "x.npz"}
