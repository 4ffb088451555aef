"""A network that is quantized while diffusers loads it is the one of the folder that `quark.quantize` makes, loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import quark
from quark.errors import ConfigError, FormatError, NotSupportedError, ShapeError
from quark.torch import QuantizeOnLoad
from quark.torch.layers.replace import quantized_layers
from tests.models.denoisers import denoiser, output, step
from tests.models.on_load import WITHOUT_DATA, assert_same, assert_same_files

EXAMPLE = Path(__file__).parents[4] / "examples/models/digits_denoiser"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("network") / "float"
    denoiser("sd3", torch.bfloat16).save_pretrained(place)
    return place


def load(folder: Path, *words: Any, **options: Any) -> Any:
    """The network of a folder, quantized while it loads."""
    config = QuantizeOnLoad(*(words or ("int8_wo",)))
    return diffusers.SD3Transformer2DModel.from_pretrained(folder, quantization_config=config, **options)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", WITHOUT_DATA)
def test_it_is_the_network_of_the_quantized_folder(folder: Path, scheme: str, tmp_path: Path) -> None:
    try:
        quark.quantize(folder, scheme, output=tmp_path / "out")
    except ShapeError:
        with pytest.raises(ShapeError, match="Possible"):
            load(folder, scheme)
        return
    network, batch = load(folder, scheme), step("sd3", dtype=torch.bfloat16)
    expected: Any = diffusers.SD3Transformer2DModel.from_pretrained(tmp_path / "out")
    assert_same(network, expected)
    assert (network.dtype, network.quantization_method) == (torch.bfloat16, expected.quantization_method)
    assert network.config.quantization_config == expected.config.quantization_config
    assert torch.equal(output(network, batch), output(expected, batch))
    network.save_pretrained(tmp_path / "saved")
    assert_same_files(tmp_path / "saved", tmp_path / "out")


@pytest.mark.slow
def test_a_trained_denoiser_is_quantized_while_it_loads(tmp_path: Path) -> None:
    network = load(EXAMPLE, "int4_wo_32")
    quark.quantize(EXAMPLE, "int4_wo_32", output=tmp_path / "out")
    assert_same(network, diffusers.SD3Transformer2DModel.from_pretrained(tmp_path / "out"))


@pytest.mark.slow
def test_shards_places_and_types_are_those_of_diffusers(folder: Path, tmp_path: Path) -> None:
    plain = load(folder)
    diffusers.SD3Transformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16).save_pretrained(
        tmp_path / "shards", max_shard_size="100KB"
    )
    assert_same(load(tmp_path / "shards"), plain)
    assert_same(load(folder, device_map="auto"), plain)
    quark.quantize(folder, "int8_wo", output=tmp_path / "wide", dtype="float32")
    assert_same(
        load(folder, torch_dtype=torch.float32), diffusers.SD3Transformer2DModel.from_pretrained(tmp_path / "wide")
    )


@pytest.mark.slow
def test_components_of_a_pipeline_are_quantized_while_it_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    unet: Any = diffusers.UNet2DModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, in_channels=3, out_channels=3,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler()).save_pretrained(tmp_path / "pipeline")
    own: Any = QuantizeOnLoad("int8_wo", exclude=["*.conv1"], layers={"*.to_q": "fp8_wo"})
    config = diffusers.PipelineQuantizationConfig(quant_mapping={"unet": own})
    pipeline: Any = diffusers.DDIMPipeline.from_pretrained(tmp_path / "pipeline", quantization_config=config)
    quark.quantize(
        tmp_path / "pipeline/unet", "int8_wo", output=tmp_path / "out", exclude=["*.conv1"], layer=("*.to_q=fp8_wo",)
    )
    assert quantized_layers(pipeline.unet)
    assert_same(pipeline.unet, diffusers.UNet2DModel.from_pretrained(tmp_path / "out"))


def test_configs_of_others_stand_beside_ours_in_a_pipeline() -> None:
    from transformers import BitsAndBytesConfig

    mapping: dict[str, Any] = {"transformer": QuantizeOnLoad("int8_wo"), "text_encoder": BitsAndBytesConfig()}
    diffusers.PipelineQuantizationConfig(quant_mapping=mapping)
    with pytest.raises(ValueError, match="could not be found"):
        diffusers.PipelineQuantizationConfig(quant_mapping={"transformer": "int8_wo"})


@pytest.mark.slow
def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(NotSupportedError, match="no part on the disk"):
        load(folder, device_map={"": "disk"}, offload_folder=tmp_path)
    with pytest.raises(ConfigError, match=r"the pattern '\*\.zzz' matches no layer"):
        load(folder, "int8_wo", [], {"*.zzz": "fp8_wo"})
    tensors = load_file(folder / "diffusion_pytorch_model.safetensors")
    lost = next(name for name in tensors if name.endswith("to_q.weight"))
    del tensors[lost]
    save_file(tensors, tmp_path / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(FormatError, match=f"it has no {lost}"):
        load(tmp_path)
