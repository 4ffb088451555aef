"""A GGUF file has the same bytes through every door: a model in memory, block by block from disk, file to file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec
from quark.errors import NotSupportedError
from quark.gguf import save_imatrix
from quark.jobs.folders import flows
from quark.torch import LLMTemplate, ModelQuantizer, export_gguf, gguf_config
from quark.torch.algorithms.block_loop import LoopState
from quark.torch.calibration import calibrate
from quark.torch.calibration.calibrate import calibrate_tensor
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.flows import file2file, from_disk
from quark.torch.flows.file2file import quantize_files
from quark.torch.flows.from_disk import stream
from quark.torch.flows.resume import Manifest
from quark.torch.layers.fake_quant import FakeQuantize
from quark.torch.writers import by_rows
from quark.torch.writers.gguf.file import GgufTarget
from quark.torch.writers.gguf.imatrix import collect_imatrix
from tests.commands.program import quark as program
from tests.models.gguf_rows import LLAMA3, LONG, build
from tests.models.sources import with_further_tokens
from tests.models.torch_zoo import LANGUAGE_MODEL

Config = Callable[[Path], QConfig]

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
"""Rows of whole blocks of 256."""
FURTHER = {"glm4_moe": "model.layers.2.", "exaone_moe": "mtp.layers.0."}
JOINS = {"eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden"}
"""What EXAONE calls what joins a further layer to the model."""


def folder(kind: str, path: Path, **options: Any) -> Path:
    """A model in bfloat16 with a tokenizer, its norms in float32, and where the family has one a further layer."""
    build(kind, torch.bfloat16, **options).save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(LANGUAGE_MODEL / file, path / file)
    if kind in FURTHER:
        with_further_tokens(path, FURTHER[kind], "num_nextn_predict_layers")
    tensors = load_file(path / "model.safetensors")
    if kind == "exaone_moe":
        for ours, theirs in JOINS.items():
            tensors[f"{theirs}.weight"] = tensors.pop(f"{FURTHER[kind]}{ours}.weight")
    tensors |= {name: x.float() + 1e-4 for name, x in tensors.items() if name.endswith("layernorm.weight")}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def mix(name: str, **options: Any) -> Config:
    return lambda source: gguf_config(OpenedFolder(source).skeleton, name, **options)


def scheme(name: str) -> Config:
    return lambda source: LLMTemplate.get("auto").get_config(name)


def everywhere(name: str, **layers: str) -> Config:
    """A scheme of weights in every layer, embeddings and head too; others by their patterns."""
    rules = {pattern: config_of_layer(LayerSpec(weight=SCHEMES[other].weight)) for pattern, other in layers.items()}
    spec = config_of_layer(LayerSpec(weight=SCHEMES[name].weight))
    return lambda source: QConfig(
        global_quant_config=spec, layer_quant_config=rules, exclude=["*.gate", "*router*", "*lm_head"]
    )


def in_memory(config: QConfig, source: Path, output: Path, data: Any = None) -> bytes:
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(load_float_model(OpenedFolder(source), dequantize=True), data))
    return export_gguf(model, output.parent, output.stem, source).read_bytes()


def streamed(config: QConfig, source: Path, output: Path, data: Any = None) -> bytes:
    stream(config, OpenedFolder(source), output, data, target=GgufTarget(source))
    return output.read_bytes()


def file_to_file(config: QConfig, source: Path, output: Path) -> bytes:
    quantize_files(config, OpenedFolder(source), output, devices=["cpu"], target=GgufTarget(source))
    return output.read_bytes()


def same(config: Config, source: Path, tmp_path: Path) -> None:
    expected = in_memory(config(source), source, tmp_path / "memory.gguf")
    assert file_to_file(config(source), source, tmp_path / "files.gguf") == expected
    assert streamed(config(source), source, tmp_path / "streamed.gguf") == expected
    assert sorted(file.name for file in tmp_path.iterdir() if file.suffix != ".gguf") == ["float"]


CASES: Mapping[str, tuple[str, Config, dict[str, Any]]] = {
    "tied, a mix": ("llama", mix("q4_k_m"), {**WIDE, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "head of its own, another mix": ("starcoder2", mix("iq4_xs"), {**WIDE, "num_hidden_layers": 2}),
    "tied, embeddings in float": ("qwen3", scheme("int4_wo_32"), {"tie_word_embeddings": True}),
    "q4_0": ("mistral", mix("q4_0"), {}),
    "asymmetric": ("llama", scheme("uint4_wo_32"), {}),
    "8 bits for each row": ("llama", scheme("int8_wo"), {}),
    "all layers": ("gemma2", everywhere("int4_wo_128"), WIDE),
    "transposed": ("gpt2", mix("q4_k_m"), {}),
    "transposed, some in float": ("gpt2", mix("q8_0", exclude_layers=["*.mlp.*"]), {}),
    "experts": ("mixtral", mix("q4_k_m"), {}),
    "experts, a shared one in one tensor": ("granitemoeshared", mix("q5_k_m"), {}),
    "experts of which rows alternate": ("gpt_oss", scheme("mxfp4_weight_only"), {}),
    "fused heads": ("falcon", mix("q4_0"), {}),
    "states": ("mamba2", mix("q8_0"), {}),
    "delta rules": ("qwen3_next", mix("q4_0"), {}),
    "factors of rotations": ("phi3", mix("q4_0"), {"rope_parameters": LONG}),
    "a further layer": ("glm4_moe", everywhere("int4_wo_32", **{"model.layers.2.*": "int8_wo"}), {}),
    "a further layer of another name": ("exaone_moe", everywhere("int4_wo_32"), {}),
    "a further layer in codes": ("exaone_moe", everywhere("int4_wo_32", **{"mtp.layers.0.*": "int4_wo_32"}), {}),
    "latent attention": ("deepseek_v3", mix("q4_0"), {}),
}
EVERYDAY = ("tied, a mix",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EVERYDAY else [pytest.mark.slow]) for name in CASES]
)
def test_the_bytes_of_every_door(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, config, options = CASES[name]
    monkeypatch.setattr(by_rows, "PIECE", 5000)  # so that these small tensors are converted some rows at a time
    same(config, folder(kind, tmp_path / "float", **options), tmp_path)


# With data. ----------------------------------------------------------------------------------------------------------

IDS = [torch.randint(3, 2048, (2, 16), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
BY_BLOCKS: Mapping[str, tuple[str, str]] = {
    "importance": ("llama", "q4_0"),
    "qronos": ("qwen3_moe", "q4_0"),
    "gptq": ("llama", "q5_1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", BY_BLOCKS)
def test_blocks_that_are_solved_give_the_bytes_of_the_model_in_memory(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the head, which lies outside of them, and stays in float here. Of embeddings some rows are there."""
    (kind, name), rows = BY_BLOCKS[algorithm], []

    def noted(tensor: str, x: torch.Tensor, quantizer: FakeQuantize) -> None:
        rows.append(len(x))
        calibrate_tensor(tensor, x, quantizer)

    monkeypatch.setattr(by_rows, "PIECE", 1 << 14)
    monkeypatch.setattr(from_disk, "calibrate_tensor", noted)
    source = folder(kind, tmp_path / "float", tie_word_embeddings=False)
    config = mix(name, algorithm=[algorithm], exclude_layers=["lm_head"])
    expected = in_memory(config(source), source, tmp_path / "memory.gguf", IDS)
    assert streamed(config(source), source, tmp_path / "streamed.gguf", IDS) == expected
    assert len(rows) > 10 and max(rows) <= 128


class Killed(BaseException):
    pass


@pytest.mark.parametrize("blocks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_killed_run_goes_on(blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder("llama", tmp_path / "float")
    config = mix("q4_0", algorithm=["importance"])
    expected = streamed(config(source), source, tmp_path / "whole.gguf", IDS)
    finish, count, output = Manifest.finish, [], tmp_path / "out.gguf"

    def counting(self: Manifest, block: str, places: Any, state: LoopState) -> None:
        finish(self, block, places, state)
        count.append(block)
        if len(count) == blocks:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Manifest, "finish", counting)
        streamed(config(source), source, output, IDS)
    unfinished = tmp_path / "out.gguf.partial"
    assert not output.exists() and (unfinished / "model" / "out.gguf").stat().st_size == len(expected)
    assert streamed(config(source), source, output, IDS) == expected
    assert not unfinished.exists()


@pytest.mark.slow
def test_a_run_that_was_killed_when_its_file_was_in_its_place_begins_anew(tmp_path: Path) -> None:
    source, output = folder("llama", tmp_path / "float"), tmp_path / "out.gguf"
    config = mix("q4_0")(source)

    def killed(self: Manifest) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Manifest, "remove", killed)
        streamed(config, source, output)
    expected = output.read_bytes()
    stream(config, OpenedFolder(source), output, overwrite=True, target=GgufTarget(source))
    assert output.read_bytes() == expected and not (tmp_path / "out.gguf.partial").exists()


# By the command. -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--scheme", "q4_0"), ("--scheme", "q4_k_m", "--layer", "*.down_proj=int8_wo")])
def test_the_command_writes_the_same_file_in_every_way(options: tuple[str, ...], tmp_path: Path) -> None:
    source, found = folder("llama", tmp_path / "float", tie_word_embeddings=True), []
    for name, way in {"files": (), "streamed": ("--stream",), "memory": ("--no-stream",)}.items():
        done = program("quantize", source, "-o", tmp_path / name, "--format", "gguf", *options, *way)
        assert done.code == 0, done.err
        assert [file.name for file in (tmp_path / name).iterdir()] == ["float.gguf"]
        found.append((tmp_path / name / "float.gguf").read_bytes())
    assert found[0] == found[1] == found[2]
    done = program("quantize", source, "-o", source / "here.gguf", "--format", "gguf", *options)
    assert done.code == 0 and (source / "here.gguf").read_bytes() == found[0]


@pytest.mark.parametrize("way", ["", pytest.param("--stream", marks=pytest.mark.slow)])
def test_a_tokenizer_that_has_no_place_is_refused_before_the_first_block(way: str, tmp_path: Path) -> None:
    source = folder("llama", tmp_path / "float", vocab_size=1024)
    written = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (file2file, calibrate):
            patch.setattr(module, "tensor_qparams", lambda *given: written.append(given))
        done = program(
            "quantize", source, "-o", tmp_path / "out.gguf", "--for", "llama.cpp", "--effort", "fast", *way.split()
        )
    assert done.code == 1 and "has 2048 tokens; the model has 1024" in done.err and not written
    assert [path.name for path in tmp_path.iterdir()] == ["float"]


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, text = folder("llama", tmp_path / "float"), tmp_path / "calib.txt"
    text.write_text("quantized models are smaller, and what is left of them is kept. " * 40)
    line = ("--for", "llama.cpp", "--calib", text, "--samples", "4", "--length", "16")
    monkeypatch.setattr(flows, "fits_memory", lambda size: False)
    done = program("quantize", source, "-o", tmp_path / "a.gguf", *line)
    assert done.code == 0, done.err
    monkeypatch.undo()
    assert program("quantize", source, "-o", tmp_path / "b.gguf", *line, "--stream").code == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    done = program(
        "quantize", source, "-o", tmp_path / "c.gguf", *line, "--stream", "--save-imatrix", tmp_path / "m.dat"
    )
    assert done.code == 1 and "--save-imatrix with --stream" in done.err and not (tmp_path / "c.gguf").exists()


@pytest.mark.slow
def test_a_file_of_a_size_is_streamed(tmp_path: Path) -> None:
    source, text = folder("llama", tmp_path / "float", tie_word_embeddings=True), tmp_path / "calib.txt"
    text.write_text("quantized models are smaller, and what is left of them is kept. " * 40)
    line = ("--for", "llama.cpp", "--calib", text, "--samples", "4", "--length", "16", "--algorithm", "importance")
    for name, way in {"streamed": "--stream", "memory": "--no-stream"}.items():
        done = program("quantize", source, "-o", tmp_path / f"{name}.gguf", *line, "--bits", "5.5", way)
        assert done.code == 0, done.err
    assert (tmp_path / "streamed.gguf").stat().st_size == (tmp_path / "memory.gguf").stat().st_size


@pytest.mark.slow
def test_layers_beside_a_model_without_a_place_are_refused(tmp_path: Path) -> None:
    source = folder("llama", tmp_path / "float")
    with_further_tokens(source, "model.layers.2.", "num_nextn_predict_layers")
    config = everywhere("int4_wo_32", **{"model.layers.2.*": "int8_wo"})(source)
    for door in (in_memory, streamed, file_to_file):
        with pytest.raises(NotSupportedError, match="have no names for such layers"):
            door(config, source, tmp_path / "out.gguf")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [None, "gptq"])
def test_an_importance_matrix_weighs_blocks_as_the_model_in_memory(algorithm: str | None, tmp_path: Path) -> None:
    source, file = folder("qwen3_moe", tmp_path / "float", tie_word_embeddings=False), tmp_path / "imatrix.dat"
    save_imatrix(collect_imatrix(load_float_model(OpenedFolder(source)), IDS), file, ["text"])
    options = {"algorithm": algorithm and [algorithm], "exclude_layers": ["lm_head"]}
    config, data = mix("q4_0", imatrix=file, **options), IDS if algorithm else None
    expected = in_memory(config(source), source, tmp_path / "memory.gguf", data)
    assert streamed(config(source), source, tmp_path / "streamed.gguf", data) == expected
    assert in_memory(mix("q4_0", **options)(source), source, tmp_path / "plain.gguf", data) != expected
