"""File to file: the bytes of the model path, from every kind of source, whole or not at all."""

from __future__ import annotations

import json
import os
import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from quark.core.scales import QParams
from quark.core.schemes import SCHEMES
from quark.core.spec import TensorSpec
from quark.errors import (
    ConfigError,
    FormatError,
    NonFiniteError,
    NotSupportedError,
    OutputExistsError,
)
from quark.torch import LLMTemplate, ModelQuantizer, QuantFlow, export_safetensors
from quark.torch.calibration.calibrate import tensor_qparams
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.safetensors_file import (
    DTYPES,
    ByteRange,
    TensorFile,
    create_file,
    write_across,
    write_tensor,
)
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.lowering import config_of_tensor
from quark.torch.flows import file2file
from quark.torch.flows.from_disk import stream
from quark.torch.writers import by_rows, folder
from tests.models.architectures import build
from tests.models.families import family
from tests.models.torch_zoo import tiny_llama, tiny_opt

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WITHOUT_DATA = [name for name, layer in SCHEMES.items() if not layer.needs_data]


def scheme(name: str, **options: Any) -> QConfig:
    return LLMTemplate.get("auto").get_config(name, **options)


def save_float(folder: Path, dtype: torch.dtype = torch.bfloat16, shard: str = "40KB", **options: Any) -> Path:
    """A random Llama as a folder of several shards."""
    tiny_llama(dtype=dtype, **options).save_pretrained(folder, max_shard_size=shard)
    return folder


def in_memory(config: QConfig, source: Path, output: Path, freeze: bool = True, **options: Any) -> dict[str, bytes]:
    """The files of the model path."""
    quantizer = ModelQuantizer(config)
    model = quantizer.quantize_model(AutoModelForCausalLM.from_pretrained(source, dtype="auto"))
    export_safetensors(quantizer.freeze(model) if freeze else model, output, **options)
    return contents(output)


def file_to_file(config: QConfig, source: Path, output: Path, **options: Any) -> dict[str, bytes]:
    ModelQuantizer(config).direct_quantize_checkpoint(source, output, **options)
    return contents(output)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.slow
@pytest.mark.parametrize("piece", [by_rows.PIECE, 64])
@pytest.mark.parametrize("first", range(0, len(WITHOUT_DATA), 2 * len(LINEARS)))
def test_every_scheme_gives_the_bytes_of_the_model_path(
    first: int, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_rows, "PIECE", piece)
    source = save_float(tmp_path / "float")
    chosen = WITHOUT_DATA[first : first + 2 * len(LINEARS)]
    rules = {f"*layers.{i // len(LINEARS)}.*{LINEARS[i % len(LINEARS)]}": name for i, name in enumerate(chosen)}
    config = scheme("int8_wo", layer_config=rules)
    expected = in_memory(config, source, tmp_path / "memory", freeze=False, max_shard_size="60KB")
    assert len([name for name in expected if name.endswith(".safetensors")]) > 3
    assert file_to_file(config, source, tmp_path / "files", max_shard_size="60KB") == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mxfp4", "uint4_wo_128", "ptpc_fp8"])
def test_freezing_changes_nothing(name: str, tmp_path: Path) -> None:
    source = save_float(tmp_path / "float", torch.float16)
    assert in_memory(scheme(name), source, tmp_path / "memory") == file_to_file(scheme(name), source, tmp_path / "f")


def shared_scales() -> QConfig:
    """NVFP4 weights, whose scales have one scale for q, k, v and one for gate, up."""
    weight = config_of_tensor(SCHEMES["nvfp4"].weight)
    return QConfig(
        global_quant_config=QLayerConfig(weight=weight),
        exclude=["lm_head"],
        shared_scale_groups=[["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]],
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_siblings_share_a_scale_across_shards_and_workers(workers: int, tmp_path: Path) -> None:
    source = save_float(tmp_path / "float", torch.float32, "60KB")
    expected = in_memory(shared_scales(), source, tmp_path / "memory", freeze=False, max_shard_size="60KB")
    found = file_to_file(shared_scales(), source, tmp_path / "files", max_shard_size="60KB", workers=workers)
    assert found == expected
    stored: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "files").glob("*.safetensors"):
        stored |= load_file(file)
    scales = [stored[f"model.layers.0.self_attn.{n}_proj.weight_scale_2"] for n in "qkvo"]
    assert scales[0] == scales[1] == scales[2] != scales[3]


@pytest.mark.parametrize("options", [{"weight_format": "fake_quantized"}, {"pack_method": "order"}])
def test_formats(options: dict[str, str], tmp_path: Path) -> None:
    source = save_float(tmp_path / "float")
    config = scheme("int4_wo_32")
    expected = in_memory(config, source, tmp_path / "memory", freeze=False, **options)
    assert file_to_file(config, source, tmp_path / "files", **options) == expected


def test_tensors_are_copied_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, config, pieces = save_float(tmp_path / "float"), scheme("int4_wo_32"), []
    expected = file_to_file(config, source, tmp_path / "whole")

    def write(tensor: torch.Tensor, places: list[ByteRange]) -> list[ByteRange]:
        pieces.append(tensor.nbytes)
        return write_across(tensor, places)

    monkeypatch.setattr(by_rows, "PIECE", 64)
    monkeypatch.setattr(by_rows, "write_across", write)
    assert file_to_file(config, source, tmp_path / "pieces") == expected
    assert pieces.count(64) > 100
    pieces.clear()
    stream(config, OpenedFolder(source), tmp_path / "streamed")
    assert contents(tmp_path / "streamed") == expected and pieces.count(64) > 100


@pytest.mark.parametrize("name", ["int8_wo", "uint4_wo_128"])
def test_weights_are_converted_some_rows_at_a_time(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows of next to nothing are refused on their own, and not beside others.
    source = save_float(tmp_path / "float", shard="5GB")
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][:16] *= 1e-30
    save_file(tensors, file, metadata={"format": "pt"})
    expected, rows = file_to_file(scheme(name), source, tmp_path / "whole"), []

    def qparams(x: torch.Tensor, spec: TensorSpec) -> QParams:
        rows.append(len(x))
        return tensor_qparams(x, spec)

    monkeypatch.setattr(by_rows, "PIECE", 64)
    monkeypatch.setattr(file2file, "tensor_qparams", qparams)
    assert file_to_file(scheme(name), source, tmp_path / "pieces") == expected
    assert rows.count(8) > 0.9 * len(rows)
    tensors["model.layers.0.mlp.up_proj.weight"][20:22, 3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"^model\.layers\.0\.mlp\.up_proj\.weight: 2 of \d+ values"):
        file_to_file(scheme(name), source, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("form", "name"),
    [("awq", "uint4_wo_32"), ("compressed-tensors", "uint4_wo_32"), ("gptq", "int4_wo_32"), ("gptq", "int2_wo_64")],
)
def test_other_formats_are_converted_some_rows_at_a_time(
    form: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, rows = save_float(tmp_path / "float"), []
    expected = in_memory(scheme(name), source, tmp_path / "memory", custom_mode=form)

    def qparams(x: torch.Tensor, spec: TensorSpec) -> QParams:
        rows.append(len(x))
        return tensor_qparams(x, spec)

    monkeypatch.setattr(by_rows, "PIECE", 64)
    monkeypatch.setattr(file2file, "tensor_qparams", qparams)
    assert file_to_file(scheme(name), source, tmp_path / "pieces", custom_mode=form) == expected
    assert {*rows} == {8 if form == "awq" else 32}


@pytest.mark.parametrize("exclude", [["lm_head"], []])
def test_tied_embeddings(exclude: list[str], tmp_path: Path) -> None:
    source = save_float(tmp_path / "float", tie_word_embeddings=True)
    config = scheme("int8_wo", exclude_layers=exclude)
    expected = in_memory(config, source, tmp_path / "memory", freeze=False)
    assert file_to_file(config, source, tmp_path / "files") == expected


def test_other_architectures_names_and_companions(tmp_path: Path) -> None:
    source = tiny_opt(tmp_path / "float")
    expected = in_memory(scheme("int8_wo"), source, tmp_path / "memory", freeze=False)
    assert "tokenizer.json" in expected
    assert file_to_file(scheme("int8_wo"), source, tmp_path / "files") == expected


def test_a_checkpoint_of_the_base_model(tmp_path: Path) -> None:
    """Names without the prefix of the causal model, as AutoModel saves them; the head is tied."""
    source = save_float(tmp_path / "whole", tie_word_embeddings=True)
    AutoModel.from_pretrained(source, dtype="auto").save_pretrained(tmp_path / "float")
    path = tmp_path / "float" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["LlamaForCausalLM"]}))
    expected = in_memory(scheme("int8_wo"), tmp_path / "float", tmp_path / "memory", freeze=False)
    assert file_to_file(scheme("int8_wo"), tmp_path / "float", tmp_path / "files") == expected


@pytest.mark.slow
def test_names_are_those_of_published_checkpoints(tmp_path: Path) -> None:
    """GPT-NeoX calls its head `embed_out`, which transformers calls `lm_head`."""
    build("gpt_neox").save_pretrained(tmp_path / "float")
    config = scheme("int8_wo", exclude_layers=[])
    expected = in_memory(config, tmp_path / "float", tmp_path / "memory", freeze=False)
    assert {"embed_out.weight", "embed_out.weight_scale"} < set(load_file(tmp_path / "memory" / "model.safetensors"))
    assert file_to_file(config, tmp_path / "float", tmp_path / "files") == expected
    stream(config, OpenedFolder(tmp_path / "float"), tmp_path / "streamed")
    assert contents(tmp_path / "streamed") == expected


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_are_layers_of_their_own_in_files(model_type: str, tmp_path: Path) -> None:
    """A checkpoint holds one tensor for each projection of each expert, which transformers fuses when it loads."""
    family(model_type).save_pretrained(tmp_path / "float")
    config = scheme("mxfp4")
    expected = in_memory(config, tmp_path / "float", tmp_path / "memory", freeze=False)
    stored = load_file(tmp_path / "memory" / "model.safetensors")
    assert any("experts.3." in name and name.endswith("weight_scale") for name in stored)
    assert file_to_file(config, tmp_path / "float", tmp_path / "files", workers=1) == expected
    stream(config, OpenedFolder(tmp_path / "float"), tmp_path / "streamed")
    assert contents(tmp_path / "streamed") == expected


def test_layers_that_are_stored_transposed(tmp_path: Path) -> None:
    """Conv1D, all of it in rows that lie apart in the file."""
    family("gpt2").save_pretrained(tmp_path / "float")
    config = scheme("int4_wo_32")
    expected = in_memory(config, tmp_path / "float", tmp_path / "memory", freeze=False)
    assert file_to_file(config, tmp_path / "float", tmp_path / "files") == expected
    stream(config, OpenedFolder(tmp_path / "float"), tmp_path / "streamed")
    assert contents(tmp_path / "streamed") == expected


# Bad input. ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "fp8", "nvfp4", "mxfp4_fp8"])
def test_static_activations_are_refused(name: str, tmp_path: Path) -> None:
    source = save_float(tmp_path / "float")
    with pytest.raises(ConfigError, match=r"layers\.0.*\.input .* static scale.*dynamic"):
        file_to_file(scheme(name), source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_transformers_would_not_find_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each flow that works without the model: the same question as with it in memory."""
    source, asked = save_float(tmp_path / "float"), []

    def unfound(model: Any, form: Any, held: Any, tensors: Any, *_: object) -> None:
        asked.append((form.name, "model.layers.0.mlp.up_proj.weight" in set(tensors)))
        raise NotSupportedError("would make up")

    monkeypatch.setattr(folder, "check_readers", unfound)
    with pytest.raises(NotSupportedError, match="would make up"):
        file_to_file(scheme("int8_wo"), source, tmp_path / "out")
    with pytest.raises(NotSupportedError, match="would make up"):
        stream(scheme("int8_wo"), OpenedFolder(source), tmp_path / "out")
    assert asked == [("quark", True)] * 2 and not (tmp_path / "out").exists()


def test_a_model_is_no_input_of_this_flow() -> None:
    config = replace(scheme("int8_wo"), quant_flow=QuantFlow.file2file)
    with pytest.raises(ConfigError, match="direct_quantize_checkpoint"):
        ModelQuantizer(config).quantize_model(tiny_llama())


def damage(source: Path, kind: str) -> str:
    """Damage one shard; return what the error must say."""
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    victim = source / index["model.layers.1.mlp.up_proj.weight"]
    if kind == "missing":
        victim.unlink()
        return rf"{victim.name}, which is not there"
    if kind == "partly written":
        os.truncate(victim, victim.stat().st_size - 100)
        return rf"{victim.name} is truncated: its header promises \d+ bytes, it has \d+"
    if kind == "empty":
        victim.write_bytes(b"")
        return rf"{victim.name} is no safetensors file"
    if kind == "corrupt header":
        victim.write_bytes(victim.read_bytes()[:8] + b"\xff" * 100 + victim.read_bytes()[108:])
        return rf"{victim.name} is no safetensors file, or its header is corrupt"
    tensors = load_file(victim)
    if kind == "lacks a tensor":
        del tensors["model.layers.1.mlp.up_proj.weight"]
        said = r"lacks 1 of the \d+ tensors .* model\.layers\.1\.mlp\.up_proj\.weight"
    elif kind == "other shape":
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 4)
        said = r"up_proj\.weight has shape \(3, 4\).*calls for \(256, 128\)"
    else:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
        said = r"model\.layers\.1\.mlp\.up_proj\.weight: 1 of 32768 values are NaN"
    save_file(tensors, victim)
    return said


KINDS = ["missing", "partly written", "empty", "corrupt header", "lacks a tensor", "other shape", "NaN"]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_shards(kind: str, tmp_path: Path) -> None:
    source = save_float(tmp_path / "float")
    said = damage(source, kind)
    error = NonFiniteError if kind == "NaN" else FormatError
    with pytest.raises(error, match=said):
        file_to_file(scheme("int8_wo"), source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float"]


def test_what_is_there_stays(tmp_path: Path) -> None:
    source = save_float(tmp_path / "float")
    first = file_to_file(scheme("int8_wo"), source, tmp_path / "out")
    with pytest.raises(OutputExistsError):
        file_to_file(scheme("mxfp4"), source, tmp_path / "out", overwrite=False)
    assert contents(tmp_path / "out") == first
    assert file_to_file(scheme("mxfp4"), source, tmp_path / "out", overwrite=True) != first


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3, None])
def test_as_many_workers_write_the_same_bytes(workers: int | None, tmp_path: Path) -> None:
    source = save_float(tmp_path / "float")
    expected = in_memory(scheme("mxfp4"), source, tmp_path / "memory")
    threads = torch.get_num_threads()
    assert file_to_file(scheme("mxfp4"), source, tmp_path / "files", workers=workers) == expected
    assert torch.get_num_threads() == threads


def test_workers_convert_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quark.torch.flows import file2file

    both, convert = threading.Barrier(2, timeout=20), file2file.Converter.__call__
    tensors: list[int] = []

    def wait(converter: file2file.Converter, family: file2file.Family) -> None:
        tensors.append(id(converter))
        if len(tensors) <= 2:
            both.wait()
        convert(converter, family)

    monkeypatch.setattr(file2file.Converter, "__call__", wait)
    file_to_file(scheme("int8_wo"), save_float(tmp_path / "float"), tmp_path / "files", workers=2)
    assert len(set(tensors)) == 2


def test_an_error_of_a_worker_names_the_tensor_and_leaves_nothing(tmp_path: Path) -> None:
    source = save_float(tmp_path / "float", shard="5GB")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][0, 0] = float("nan")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    threads = torch.get_num_threads()
    with pytest.raises(NonFiniteError, match=name):
        file_to_file(scheme("int8_wo"), source, tmp_path / "out", workers=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float"]
    assert torch.get_num_threads() == threads


# The file format. ----------------------------------------------------------------------------------------------------


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    numbers = torch.arange(24).reshape(2, 3, 4) % 2
    # F8_E8M0 has a name in the format that this version of its library does not write.
    kinds = {name: dtype for name, dtype in DTYPES.items() if name != "F8_E8M0"}
    tensors = {f"{'ba'[i % 2]}.é{name}": numbers.to(dtype) for i, (name, dtype) in enumerate(kinds.items())}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    places = create_file(tmp_path / "ours", {name: tensor.to("meta") for name, tensor in tensors.items()})
    for name, tensor in reversed(tensors.items()):
        write_tensor(tensor, places[name])
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    file = TensorFile(tmp_path / "theirs")
    for name, tensor in tensors.items():
        for _ in range(2):
            found = file.read(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert found.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
            file.release(name)


def laid_out(header: str, data: bytes) -> bytes:
    return struct.pack("<Q", len(header.encode())) + header.encode() + data


ROW = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
OTHER = '"b":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
CONTRADICTORY = {
    "bytes behind": (f"{{{ROW}}}", 5, "the tensors end at byte"),
    "gap": (f"{{{ROW},{OTHER % (8, 12)}}}", 12, "begins at byte"),
    "overlap": (f"{{{ROW},{OTHER % (0, 4)}}}", 4, "begins at byte"),
    "metadata twice": (f'{{"__metadata__":{{}},"__metadata__":{{}},{ROW}}}', 4, "twice"),
    "metadata": (f'{{"__metadata__":{{"a":1}},{ROW}}}', 4, "__metadata__"),
    "metadata of another kind": (f'{{"__metadata__":5,{ROW}}}', 4, "__metadata__"),
    "negative": ('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', 4, "is no shape"),
    "more than memory": (ROW.replace("[1]", str([2**31] * 8)).join("{}"), 4, ""),
    "deep": ("[" * 99999 + "]" * 99999, 4, "recursion"),
    "UTF-16": ("\ufeff" + f"{{{ROW}}}", 4, ""),
}


@pytest.mark.parametrize("kind", CONTRADICTORY)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(tmp_path: Path, kind: str) -> None:
    header, size, said = CONTRADICTORY[kind]
    (tmp_path / "file").write_bytes(laid_out(f"{{{ROW}}}", bytes(4)))
    assert TensorFile(tmp_path / "file").names == ["a"]
    (tmp_path / "file").write_bytes(laid_out(header, bytes(size)))
    with pytest.raises(SafetensorError), safe_open(tmp_path / "file", "pt"):
        pass
    with pytest.raises(FormatError, match=f"file is no safetensors file, or its header is corrupt: .*{said}"):
        TensorFile(tmp_path / "file")


def test_tensors_that_the_model_ties_and_the_folder_does_not_are_refused(tmp_path: Path) -> None:
    """transformers keeps both; the head was dropped in silence."""
    source = save_float(tmp_path / "float", shard="1GB")
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(NotSupportedError, match=r"different tensors under names that its model ties.*lm_head\.weight"):
        file_to_file(scheme("int8_wo"), source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
