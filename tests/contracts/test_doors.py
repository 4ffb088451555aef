"""The same request gives the same bytes through every door, of every family, from every kind of source.

Doors: a model in memory, block by block from disk, file to file, the command and the call.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

import quark
from quark.core.schemes import SCHEMES
from quark.errors import ConfigError, NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.lowering import config_of_tensor
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
EVERYDAY = ("deepseek_v3", "nemotron_h")
FAMILIES = [
    pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.slow)
    for name in ("llama", "mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "minimax_m2", "gpt_oss", *HYBRID)
]


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
    model = load_float_model(source, dequantize=True)
    export_safetensors(quantizer.freeze(quantizer.quantize_model(model)), output)


def from_disk(source: Path, output: Path) -> None:
    stream(LLMTemplate.get("auto").get_config(SCHEME), source, output)


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


@pytest.mark.parametrize("model_type", FAMILIES)
def test_float_tensors_keep_their_types(model_type: str, tmp_path: Path) -> None:
    source = float_folder(model_type, tmp_path / "float")
    stored = load_file(source / "model.safetensors")
    tensors = same_through_every_door(source, tmp_path)
    wide = [name for name, tensor in stored.items() if tensor.dtype == torch.float32]
    assert len(wide) > 4
    for name in wide:
        assert torch.equal(tensors[name], stored[name]), name


# Quantized sources. --------------------------------------------------------------------------------------------------

Stored = dict[str, torch.Tensor]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", {"num_bits": 4, "group_size": 32, "strategy": "group"}),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                                       "scale_dtype": "torch.float8_e4m3fn"}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                                       "scale_dtype": "torch.uint8"}),
}  # fmt: skip
"""Kind -> the format of compressed-tensors, and its arguments."""


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


def quantized_folder(kind: str, model_type: str, folder: Path) -> tuple[Path, Stored]:
    """A folder whose projections are stored in codes, and the float weights that its library reads there."""
    float_folder(model_type, folder)
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name in [name for name, x in tensors.items() if x.ndim == 2 and "proj" in name]:
        parts, values[name] = fp8_blocks(tensors[name]) if kind == "blocks" else compressed(kind, tensors[name])
        parent = name.removesuffix(".weight")
        del tensors[name]
        tensors |= {f"{parent}.{part}": x.contiguous() for part, x in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said: dict[str, Any] = FP8
    if kind != "blocks":
        form, arguments = COMPRESSED[kind]
        group = {"targets": ["Linear"], "weights": arguments, "format": form}
        said = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, values


SOURCES = [
    pytest.param(kind, model_type, marks=() if (kind, model_type) == ("blocks", "deepseek_v3") else pytest.mark.slow)
    for kind in ("blocks", *COMPRESSED)
    for model_type in ("llama", "deepseek_v3", "minimax_m2")
]


@pytest.mark.parametrize(("kind", "model_type"), SOURCES)
def test_quantized_sources(kind: str, model_type: str, tmp_path: Path) -> None:
    source, values = quantized_folder(kind, model_type, tmp_path / "source")
    loaded = load_float_model(source, dequantize=True)
    own = loaded.state_dict()
    assert sum(name in own for name in values) > 5
    for name in [name for name in values if name in own]:
        # Half a unit of bfloat16, twice: the library of compressed-tensors rounds FP4 to it by itself.
        torch.testing.assert_close(own[name].float(), values[name].float(), rtol=2**-7, atol=0)
    same_through_every_door(source, tmp_path)


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


@pytest.mark.slow
def test_mxfp4_of_gpt_oss(tmp_path: Path) -> None:
    source = float_folder("gpt_oss", tmp_path / "source")
    values = mxfp4_experts(source)
    own = load_float_model(source, dequantize=True).state_dict()
    for name, value in values.items():
        assert torch.equal(own[name], value), name
    same_through_every_door(source, tmp_path)


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
    reloaded = quark.torch.import_model_from_safetensors(None, tmp_path / "file")
    with pytest.raises(NotSupportedError, match="does not build, in codes"):
        export_safetensors(reloaded, tmp_path / "again")


@pytest.mark.slow
def test_further_layers_need_no_data_and_have_no_place_in_gguf(tmp_path: Path) -> None:
    source = float_folder("glm4_moe", tmp_path / "float")
    with_further_tokens(source, *FURTHER["glm4_moe"])
    out = tmp_path / "out"
    config = LLMTemplate.get("auto").get_config("int8_wo", layer_config={"model.layers.2.*": "int8"})
    for quantize in (
        lambda: stream(config, source, out),
        lambda: ModelQuantizer(config).direct_quantize_checkpoint(source, out),
        lambda: ModelQuantizer(config).quantize_model(load_float_model(source)),
    ):
        with pytest.raises(ConfigError, match="no calibration data run through it"):
            quantize()
    gguf = program(
        "quantize", source, "-o", tmp_path / "a.gguf", "--scheme", "q8_0", "--layer", "model.layers.2.*=q4_0"
    )
    assert gguf.code == 1 and "GGUF files hold the model's layers" in gguf.err
    command("--format", "compressed-tensors", "--layer", "model.layers.2.*=int8_wo")(source, out)
    assert "model.layers.2.mlp.experts.3.down_proj.weight_scale" in load_file(out / "model.safetensors")
    assert not out.with_name("a.gguf").exists()


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
    stream(config, source, tmp_path / "streamed")
    export_safetensors(ModelQuantizer(config).quantize_model(load_float_model(source)), tmp_path / "memory")
    files, *others = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("files", "streamed", "memory")]
    assert [files, files] == others
    tensors = load_file(tmp_path / "files" / "model.safetensors")
    gate, up, down = (tensors[f"model.layers.2.mlp.experts.0.{n}_proj.weight_scale_2"] for n in ("gate", "up", "down"))
    assert gate == up != down
