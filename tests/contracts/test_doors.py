"""The same request gives the same bytes through every door, of every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quark
from quark.core.schemes import SCHEMES
from quark.errors import ConfigError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.lowering import config_of_tensor
from quark.torch.flows.from_disk import stream
from tests.commands.program import quark as program
from tests.models.doors import HYBRID, SCHEME, command, float_folder, same_through_every_door, written
from tests.models.families import MOE
from tests.models.sources import quantized_folder, with_further_tokens
from tests.models.versions import needs_transformers

NEMOTRON = needs_transformers("5.6", "has layers without experts in nemotron_h")
EVERYDAY = ("deepseek_v3", "nemotron_h")
FAMILIES = [
    pytest.param(
        name,
        marks=[*([NEMOTRON] if name == "nemotron_h" else []), *([] if name in EVERYDAY else [pytest.mark.slow])],
    )
    for name in ("llama", "mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "minimax_m2", "gpt_oss", *HYBRID)
]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_float_tensors_keep_their_types(model_type: str, tmp_path: Path) -> None:
    source = float_folder(model_type, tmp_path / "float")
    stored = load_file(source / "model.safetensors")
    tensors = same_through_every_door(source, tmp_path)
    wide = [name for name, tensor in stored.items() if tensor.dtype == torch.float32]
    assert len(wide) > 4
    for name in wide:
        assert torch.equal(tensors[name], stored[name]), name


# Layers that predict further tokens. ---------------------------------------------------------------------------------

FURTHER = {
    "deepseek_v3": ("model.layers.2.", "num_nextn_predict_layers"),
    "glm4_moe": ("model.layers.2.", "num_nextn_predict_layers"),
    "qwen3_5_text": ("mtp.layers.0.", "mtp_num_hidden_layers"),
}
"""Family -> what it calls such a layer, and the field of its config."""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FURTHER)
def test_further_layers_are_carried_whole(model_type: str, tmp_path: Path) -> None:
    source = float_folder(model_type, tmp_path / "float")
    names = with_further_tokens(source, *FURTHER[model_type])
    stored = load_file(source / "model.safetensors")
    tensors = same_through_every_door(source, tmp_path)
    for name in names:
        assert torch.equal(tensors[name], stored[name]), name
    ignored = written(tmp_path / "memory")[1]["quantization_config"]["exclude"]
    assert {name.removesuffix(".weight") for name in names if stored[name].ndim > 1} - {*ignored} == set()
    program("quantize", source, "-o", tmp_path / "ct", "--scheme", "int8_wo", "--format", "compressed-tensors")
    assert {*names} <= load_file(tmp_path / "ct" / "model.safetensors").keys()


@pytest.mark.slow
def test_further_layers_in_codes_are_carried_as_float(tmp_path: Path) -> None:
    source, _ = quantized_folder("blocks", "deepseek_v3", tmp_path / "source")
    names = with_further_tokens(source, *FURTHER["deepseek_v3"], "blocks")
    tensors = same_through_every_door(source, tmp_path)
    further = {name for name in tensors if name.startswith("model.layers.2.")}
    assert further == {name for name in names if not name.endswith("_scale_inv")}
    assert {tensors[name].dtype for name in further} == {torch.bfloat16, torch.float32}


@pytest.mark.slow
def test_what_the_class_has_no_place_for_is_kept_on_request(tmp_path: Path) -> None:
    """Experts of a layer that no field of the config announces: transformers reports them merged."""
    source = float_folder("mixtral", tmp_path / "float")
    names = with_further_tokens(source, "model.layers.7.", "unknown")
    done = program("quantize", source, "-o", tmp_path / "out", "--scheme", SCHEME)
    assert done.code == 1 and "model.layers.7." in done.err and "--keep-unexpected" in done.err
    found = []
    for name, options in {"file": (), "streamed": ("--stream",), "memory": ("--no-stream",)}.items():
        command(*options, "--keep-unexpected")(source, tmp_path / name)
        found.append((tmp_path / name / "model.safetensors").read_bytes())
    assert found[0] == found[1] == found[2]
    stored, tensors = load_file(source / "model.safetensors"), load_file(tmp_path / "file" / "model.safetensors")
    assert all(torch.equal(tensors[name], stored[name]) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8_wo", "mxfp4"])
@pytest.mark.parametrize("model_type", FURTHER)
def test_further_layers_are_quantized_on_request(model_type: str, scheme: str, tmp_path: Path) -> None:
    """As the layer that it is a copy of, by every door; what joins embeddings and states, too."""
    source = float_folder(model_type, tmp_path / "float")
    layer, field = FURTHER[model_type]
    with_further_tokens(source, layer, field)
    rule = ("--layer", f"{layer}*={scheme}", "--layer", f"model.layers.1.*={scheme}")
    found = []
    for name, options in {"file": (), "streamed": ("--stream",), "memory": ("--no-stream",)}.items():
        command(*options, *rule)(source, tmp_path / name)
        found.append(written(tmp_path / name))
        assert (tmp_path / name / "model.safetensors").read_bytes() == (
            tmp_path / "file/model.safetensors"
        ).read_bytes()
        assert found[-1][1] == found[0][1]
    tensors, config = found[0]
    quantized = [n for n in tensors if n.startswith("model.layers.1.") and n.endswith("weight_scale")]
    assert len(quantized) > 5 and f"{layer}eh_proj.weight_scale" in tensors
    own = [n for n in tensors if n.startswith("model.layers.1.")]
    assert {layer + n.removeprefix("model.layers.1.") for n in own} <= tensors.keys()
    for n in own:
        other = tensors[layer + n.removeprefix("model.layers.1.")]
        assert torch.equal(other.reshape(-1).view(torch.uint8), tensors[n].reshape(-1).view(torch.uint8)), n
    ignored = config["quantization_config"]["exclude"]
    assert not {n.removesuffix(".weight_scale") for n in tensors if n.endswith("weight_scale")} & {*ignored}
    _same_again(tmp_path / "file", tmp_path)


@pytest.mark.slow
def test_further_layers_are_in_the_plan(tmp_path: Path) -> None:
    source = float_folder("glm4_moe", tmp_path / "float")
    with_further_tokens(source, *FURTHER["glm4_moe"])
    rule = ("--scheme", SCHEME, "--layer", "model.layers.2.mlp.experts.*=mxfp4")
    done = program("plan", source, *rule)
    assert done.code == 0 and "20 layers, 12 of them quantized" in done.out and "as in the" in done.out, done.err
    command(*rule[2:])(source, tmp_path / "out")
    sizes = [sum(x.nbytes for x in written(folder)[0].values()) / 1e6 for folder in (source, tmp_path / "out")]
    assert f"size: {sizes[0]:.2f} MB -> {sizes[1]:.2f} MB" in done.out


def _same_again(folder: Path, tmp_path: Path) -> None:
    """A folder with further layers in codes is loaded, written again and converted there and back: the same bytes."""
    reloaded = quark.torch.import_model_from_safetensors(None, folder)
    export_safetensors(reloaded, tmp_path / "again")
    convert(folder, tmp_path / "other", "compressed-tensors")
    convert(tmp_path / "other", tmp_path / "back", "quark")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    before, back = written(folder)[0], written(tmp_path / "back")[0]
    assert before.keys() == back.keys()
    for name, x in before.items():  # of compressed-tensors scales are read in float32
        assert torch.equal(x.float(), back[name].float()), name
    said = [written(tmp_path / name)[1]["quantization_config"] for name in ("again", "back")]
    assert {*said[0]["exclude"]} == {*said[1]["exclude"]} == {*written(folder)[1]["quantization_config"]["exclude"]}


def convert(folder: Path, output: Path, form: str) -> None:
    done = program("convert", folder, "-o", output, "--format", form)
    assert done.code == 0, done.err


@pytest.mark.slow
def test_further_layers_are_not_calibrated(tmp_path: Path) -> None:
    source = float_folder("glm4_moe", tmp_path / "float")
    with_further_tokens(source, *FURTHER["glm4_moe"])
    out = tmp_path / "out"
    config = LLMTemplate.get("auto").get_config("int8_wo", layer_config={"model.layers.2.*": "int8"})
    for quantize in (
        lambda: stream(config, OpenedFolder(source), out),
        lambda: ModelQuantizer(config).direct_quantize_checkpoint(source, out),
        lambda: ModelQuantizer(config).quantize_model(load_float_model(OpenedFolder(source))),
    ):
        with pytest.raises(ConfigError, match="no calibration data run through it"):
            quantize()
    command("--format", "compressed-tensors", "--layer", "model.layers.2.*=int8_wo")(source, out)
    assert "model.layers.2.mlp.experts.3.down_proj.weight_scale" in load_file(out / "model.safetensors")


@pytest.mark.slow
def test_further_layers_share_scales_as_others_do(tmp_path: Path) -> None:
    """NVFP4 weights: gate and up of a carried layer have one scale of their scales."""
    source = float_folder("glm4_moe", tmp_path / "float")
    with_further_tokens(source, *FURTHER["glm4_moe"])
    weight = QLayerConfig(weight=config_of_tensor(SCHEMES["nvfp4"].weight))
    config = QConfig(
        global_quant_config=weight,
        layer_quant_config={"model.layers.2.*": weight},
        exclude=["lm_head"],
        shared_scale_groups=[["gate_proj", "up_proj"]],
    )
    ModelQuantizer(config).direct_quantize_checkpoint(source, tmp_path / "files")
    stream(config, OpenedFolder(source), tmp_path / "streamed")
    export_safetensors(
        ModelQuantizer(config).quantize_model(load_float_model(OpenedFolder(source))), tmp_path / "memory"
    )
    files, *others = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("files", "streamed", "memory")]
    assert [files, files] == others
    tensors = load_file(tmp_path / "files" / "model.safetensors")
    gate, up, down = (tensors[f"model.layers.2.mlp.experts.0.{n}_proj.weight_scale_2"] for n in ("gate", "up", "down"))
    assert gate == up != down


# Algorithms. ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["awq", "smoothquant"])
@pytest.mark.parametrize("model_type", MOE)
def test_scales_fold_into_experts_streamed_as_in_memory(model_type: str, algorithm: str, tmp_path: Path) -> None:
    """Experts that were taken apart on the meta device have no memory that they could share, and those in memory share
    none either where gate and up are columns of one tensor.
    """
    source = float_folder(model_type, tmp_path / "float")
    config = LLMTemplate.get("auto").get_config("int8_wo", algorithm=[algorithm])
    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(3, 64, (2, 32), generator=generator) for _ in range(2)]
    stream(config, OpenedFolder(source), tmp_path / "streamed", data)
    quantizer = ModelQuantizer(config)
    export_safetensors(
        quantizer.freeze(quantizer.quantize_model(load_float_model(OpenedFolder(source)), data)), tmp_path / "memory"
    )
    streamed, memory = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("streamed", "memory"))
    assert streamed == memory
