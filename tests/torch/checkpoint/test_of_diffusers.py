"""Folders of networks of diffusers: variants, shards, types; and what its loader is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quark.errors import FormatError, NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.flows.file2file import quantize_files
from quark.torch.flows.from_disk import stream
from tests.models.denoisers import denoiser, output, step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("network") / "float"
    denoiser("sd3", torch.bfloat16).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def quantized(folder: Path) -> Path:
    place = folder.with_name("quantized")
    quantize_files(LLMTemplate.get("auto").get_config("int8_wo"), OpenedFolder(folder), place, devices=["cpu"])
    return place


@pytest.mark.parametrize(
    "saved",
    [{"variant": "fp16"}, *(pytest.param(each, marks=pytest.mark.slow) for each in ({"max_shard_size": "100KB"}, {}))],
)
def test_variants_and_shards_are_read_and_file_to_file_is_the_model_in_memory(
    folder: Path, quantized: Path, tmp_path: Path, saved: dict[str, Any]
) -> None:
    model = load_float_model(OpenedFolder(folder))
    model.save_pretrained(tmp_path / "float", **saved)
    assert (tmp_path / "float" / "diffusion_pytorch_model.safetensors").exists() == (not saved)
    config = LLMTemplate.get("auto").get_config("int8_wo")
    quantize_files(config, OpenedFolder(tmp_path / "float"), tmp_path / "files", devices=["cpu"])
    quantizer = ModelQuantizer(config)
    frozen = quantizer.freeze(quantizer.quantize_model(load_float_model(OpenedFolder(tmp_path / "float"))))
    export_safetensors(frozen, tmp_path / "memory")
    for name in ("diffusion_pytorch_model.safetensors", "config.json"):
        stored = (quantized / name).read_bytes()
        assert stored == (tmp_path / "files" / name).read_bytes() == (tmp_path / "memory" / name).read_bytes()


def test_several_variants_and_pickles_are_refused(folder: Path, tmp_path: Path) -> None:
    model = load_float_model(OpenedFolder(folder))
    for variant in ("fp16", "ema"):
        model.save_pretrained(tmp_path / "several", variant=variant)
    with pytest.raises(FormatError, match=r"several variants .*ema.*fp16"):
        load_float_model(OpenedFolder(tmp_path / "several"))
    model.save_pretrained(tmp_path / "pickle", safe_serialization=False)
    with pytest.raises(
        FormatError, match=r"diffusion_pytorch_model.bin is not read: save the model once by save_pretrained\."
    ):
        load_float_model(OpenedFolder(tmp_path / "pickle"))


def test_diffusers_takes_other_types_and_places_or_says_what_it_does_not_take(quantized: Path, tmp_path: Path) -> None:
    import diffusers

    kind: Any = diffusers.SD3Transformer2DModel
    loaded = kind.from_pretrained(quantized)
    wide = kind.from_pretrained(quantized, torch_dtype=torch.float32)
    assert (loaded.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    near, exact = output(loaded, step("sd3", dtype=torch.bfloat16)), output(wide, step("sd3"))
    assert (near - exact).norm() < 0.05 * exact.norm()
    placed = kind.from_pretrained(quantized, device_map="auto")
    assert torch.equal(output(placed, step("sd3", dtype=torch.bfloat16)), near)
    with pytest.raises(NotSupportedError, match="Possible: torch_dtype=torch.bfloat16"):
        kind.from_pretrained(quantized, torch_dtype=torch.float16)
    with pytest.raises(NotSupportedError, match="no part on the disk"):
        kind.from_pretrained(quantized, device_map={"": "disk"}, offload_folder=tmp_path)


def test_other_formats_are_refused(folder: Path, tmp_path: Path) -> None:
    quantizer = ModelQuantizer(LLMTemplate.get("auto").get_config("uint4_wo_32"))
    model = quantizer.freeze(quantizer.quantize_model(load_float_model(OpenedFolder(folder))))
    with pytest.raises(NotSupportedError, match="diffusers loads no awq folder"):
        export_safetensors(model, tmp_path / "out", "awq")
    assert not (tmp_path / "out").exists()


def test_a_damaged_folder_is_refused(quantized: Path, tmp_path: Path) -> None:
    import diffusers
    from safetensors.torch import load_file, save_file

    tensors = load_file(quantized / "diffusion_pytorch_model.safetensors")
    lost = next(name for name in tensors if name.endswith("weight_scale"))
    del tensors[lost]
    save_file(tensors, tmp_path / "diffusion_pytorch_model.safetensors")
    (tmp_path / "config.json").write_text((quantized / "config.json").read_text())
    with pytest.raises(FormatError, match="lacks 1 tensors"):
        diffusers.SD3Transformer2DModel.from_pretrained(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "blocks", "algorithm"),
    [
        ("sd3", {}, None),
        ("wan", {}, None),
        ("unet", {}, None),
        ("flux", {"num_layers": 2, "num_single_layers": 2}, None),
        ("flux", {"num_layers": 2, "num_single_layers": 2}, "smooth"),
    ],
)
def test_block_by_block_gives_the_files_of_a_model_in_memory(
    name: str, blocks: dict[str, int], algorithm: str | None, tmp_path: Path
) -> None:
    denoiser(name, torch.bfloat16, **blocks).save_pretrained(tmp_path / "float")
    config = LLMTemplate.get("auto").get_config("fp8", algorithm=algorithm)
    data = [step(name, seed, torch.bfloat16) for seed in (1, 2)]
    stream(config, OpenedFolder(tmp_path / "float"), tmp_path / "stream", data)
    quantizer = ModelQuantizer(config)
    frozen = quantizer.freeze(quantizer.quantize_model(load_float_model(OpenedFolder(tmp_path / "float")), data))
    export_safetensors(frozen, tmp_path / "memory")
    for file in ("diffusion_pytorch_model.safetensors", "config.json"):
        assert (tmp_path / "stream" / file).read_bytes() == (tmp_path / "memory" / file).read_bytes()
