"""Streaming from disk: the bytes of the model in memory, also where a run was killed and went on."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, ResNetConfig, ResNetForImageClassification

from quark.errors import CalibrationError, ConfigError, FormatError, NotSupportedError, OutputError, OutputExistsError
from quark.torch import LLMTemplate, ModelQuantizer, QuantFlow, export_safetensors
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.config.algo_configs import (
    AutoRoundConfig,
    AWQConfig,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
    RotationConfig,
    SmoothQuantConfig,
)
from quark.torch.config.config import QConfig
from quark.torch.flows.from_disk import stream
from quark.torch.flows.resume import Manifest, in_use
from quark.torch.model.blocks import find_blocks
from quark.torch.writers.folder import FolderTarget
from tests.models.model_folders import model_folder
from tests.models.torch_zoo import tiny_llama, token_batches
from tests.torch.flows.test_file2file import contents, save_float

GPTQ = GPTQConfig(damp_percent=0.01)


def scheme(name: str, algorithms: list[Any] | None = None, **options: Any) -> QConfig:
    config = LLMTemplate.get("auto").get_config(name, **options)
    return QConfig(
        **{
            **{field: getattr(config, field) for field in ("global_quant_config", "exclude", "shared_scale_groups")},
            "algo_config": algorithms,
        }
    )


def in_memory(config: QConfig, source: Path, output: Path, data: Any) -> dict[str, bytes]:
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    export_safetensors(ModelQuantizer(config).quantize_model(model, data), output, max_shard_size="60KB")
    return contents(output)


def streamed(config: QConfig, source: Path, output: Path, data: Any = None, **options: Any) -> dict[str, bytes]:
    stream(config, OpenedFolder(source), output, data, target=FolderTarget(max_shard_size="60KB"), **options)
    return contents(output)


CASES = {
    "weights": (scheme("uint4_wo_32"), False),
    "live activations, head too": (scheme("mxfp4", exclude_layers=[]), False),
    "static activations": (scheme("int8"), True),
    "shared scales": (scheme("nvfp4"), True),
    "GPTQ": (scheme("uint4_wo_32", [GPTQ]), True),
    "SmoothQuant, static activations": (scheme("int8", [SmoothQuantConfig(alpha=0.5)]), True),
    "Qronos by Fisher information": (scheme("uint4_wo_32", [QronosConfig(fisher=True)]), True),
    "AWQ and GPTQ": (scheme("uint4_wo_32", [AWQConfig(), GPTQ]), True),
    "GPTAQ, static activations": (scheme("int8", [GPTAQConfig()]), True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_model_in_memory(case: str, tmp_path: Path) -> None:
    config, needs_data = CASES[case]
    source = save_float(tmp_path / "float", torch.float32, num_hidden_layers=3)
    data = token_batches() if needs_data else None
    expected = in_memory(config, source, tmp_path / "memory", data)
    assert streamed(config, source, tmp_path / "stream", data) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float", "memory", "stream"]


@pytest.mark.slow
def test_tied_embeddings_and_quantized_sources(tmp_path: Path) -> None:
    from tests.torch.checkpoint.test_sources import FP8, fp8_blocks, make

    source = save_float(tmp_path / "float", tie_word_embeddings=True)
    expected = in_memory(scheme("int8"), source, tmp_path / "memory", token_batches())
    assert streamed(scheme("int8"), source, tmp_path / "stream", token_batches()) == expected
    make(tmp_path / "fp8", fp8_blocks, FP8)
    ModelQuantizer(scheme("mxfp4")).direct_quantize_checkpoint(
        tmp_path / "fp8", tmp_path / "files", max_shard_size="60KB"
    )
    assert streamed(scheme("mxfp4"), tmp_path / "fp8", tmp_path / "stream2") == contents(tmp_path / "files")


# An encoder, and the decoder that reads what it gives. ----------------------------------------------------------------


def two_parts(name: str, folder: Path) -> tuple[Path, list[Any]]:
    """A random model of an encoder and a decoder, and batches of it."""
    source = model_folder(name, folder)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 2048, (2, 9), generator=generator) for _ in range(2)]
    if name == "whisper":
        return source, [{"input_features": torch.randn(2, 16, 100), "decoder_input_ids": x} for x in ids]
    return source, [{"input_ids": x, "decoder_input_ids": x[:, :6]} for x in ids]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
@pytest.mark.parametrize("algorithms", [[], [GPTQ], [SmoothQuantConfig(alpha=0.5), AutoRoundConfig(iters=2)]])
def test_an_encoder_and_its_decoder_are_streamed(
    name: str, algorithms: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are solved, also where a run was killed in the decoder, which reads what the encoder gave."""
    source, data = two_parts(name, tmp_path / "float")
    config = scheme("int8", algorithms)
    model = load_float_model(OpenedFolder(source))
    export_safetensors(ModelQuantizer(config).quantize_model(model, data), tmp_path / "memory")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_after(3, patch)
        stream(config, OpenedFolder(source), tmp_path / "out", data)
    stream(config, OpenedFolder(source), tmp_path / "out", data)
    assert contents(tmp_path / "out") == contents(tmp_path / "memory")


def test_all_lists_that_hold_layers_are_blocks(tmp_path: Path) -> None:
    source, data = two_parts("bart", tmp_path / "float")
    model = load_float_model(OpenedFolder(source))
    encoder, decoder = ([f"model.{part}.layers.{index}" for index in range(2)] for part in ("encoder", "decoder"))
    assert find_blocks(model, None, data[0], [f"{encoder[0]}.fc1", f"{decoder[0]}.fc1"]) == encoder + decoder
    assert find_blocks(model, None, data[0], [f"{decoder[0]}.fc1", "lm_head"]) == decoder


# A run that is killed. -----------------------------------------------------------------------------------------------


class Killed(KeyboardInterrupt):
    """Ctrl-C at a moment that a test chooses."""


def killed_after(blocks: int, monkeypatch: pytest.MonkeyPatch, before_manifest: bool = False) -> None:
    """Let the next run end when so many blocks are finished (or just before the last of them is noted)."""
    finish, count = Manifest.finish, []

    def counting(self: Manifest, *args: Any) -> None:
        count.append(1)
        if before_manifest and len(count) == blocks:
            raise Killed
        finish(self, *args)
        if len(count) == blocks:
            raise Killed

    monkeypatch.setattr(Manifest, "finish", counting)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["weights", "static activations", "GPTAQ, static activations", "Qronos by Fisher information"]
)
@pytest.mark.parametrize(("blocks", "before_manifest"), [(1, False), (2, True), (3, False)])
def test_a_killed_run_goes_on(
    case: str,
    blocks: int,
    before_manifest: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both runs say so: what is kept where, and where the second one goes on."""
    caplog.set_level(logging.INFO)
    config, needs_data = CASES[case]
    source = save_float(tmp_path / "float", torch.float32, num_hidden_layers=3)
    data = token_batches() if needs_data else None
    expected = streamed(config, source, tmp_path / "whole", data)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_after(blocks, patch, before_manifest)
        stream(config, OpenedFolder(source), tmp_path / "out", data, target=FolderTarget(max_shard_size="60KB"))
    assert not (tmp_path / "out").exists()
    done = []
    finish = Manifest.finish
    monkeypatch.setattr(Manifest, "finish", lambda self, block, *args: (done.append(block), finish(self, block, *args)))
    assert streamed(config, source, tmp_path / "out", data) == expected
    first = blocks - before_manifest
    assert done == [f"model.layers.{i}" for i in range(first, 3)]
    assert not (tmp_path / "out.partial").exists()
    said = f"{first} blocks are finished, and kept in {tmp_path / 'out.partial'}" in caplog.text
    gone_on = f"Going on from {tmp_path / 'out.partial'}, where {first} blocks" in caplog.text
    assert said == gone_on == (first > 0)


@pytest.mark.slow
def test_a_run_that_was_killed_right_after_its_last_block_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one finds every block finished, and saves nothing: what the killed one held goes all the same."""
    source = save_float(tmp_path / "float", torch.float32)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_after(2, patch)
        stream(scheme("uint4_wo_32"), OpenedFolder(source), tmp_path / "out")
    (tmp_path / "out.partial" / ".quark-0123abcd.tmp").mkdir()
    (tmp_path / "out.partial" / ".quark-0123abcd.tmp" / "manifest.json").write_text("{}")
    stream(scheme("uint4_wo_32"), OpenedFolder(source), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float", "out"]


@pytest.mark.parametrize("blocks", [1, 3])
def test_what_is_interrupted_leaves_nothing_or_says_what(
    blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before its first block is finished; or behind the last one, when the rest of the folder is written."""
    source = save_float(tmp_path / "float", torch.float32)

    def interrupted(*args: Any) -> None:
        raise Killed

    with pytest.raises(Killed):
        if blocks == 1:
            killed_after(blocks, monkeypatch, before_manifest=True)
        else:
            monkeypatch.setattr("quark.torch.flows.from_disk.move_folder", interrupted)
        stream(scheme("uint4_wo_32"), OpenedFolder(source), tmp_path / "out")
    kept = "blocks are finished, and kept in" in caplog.text
    assert ((tmp_path / "out.partial").exists(), kept) == ((False, False) if blocks == 1 else (True, True))


def test_of_a_damaged_checkpoint_nothing_stays(tmp_path: Path) -> None:
    """The first block is finished, and a run that goes on would meet the same."""
    source = save_float(tmp_path / "float", torch.float32)
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name.endswith("layers.1.input_layernorm.weight"):
                tensors[name][3] = torch.nan
        save_file(tensors, file, {"format": "pt"})
    with pytest.raises(FormatError, match=r"layers\.1\.input_layernorm\.weight cannot be read"):
        stream(
            scheme("int8"),
            OpenedFolder(source),
            tmp_path / "out",
            token_batches(),
            target=FolderTarget(max_shard_size="60KB"),
        )
    assert [path.name for path in tmp_path.iterdir()] == ["float"]


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was killed after its first block."""
    source = save_float(tmp_path / "float", torch.float32)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_after(1, patch)
        stream(
            scheme("int8"),
            OpenedFolder(source),
            tmp_path / "out",
            token_batches(),
            target=FolderTarget(max_shard_size="60KB"),
        )
    return tmp_path / "out.partial"


@pytest.mark.parametrize("left", ["nothing", "first manifest", "begun", "moved", "removed"])
def test_a_run_that_was_killed_at_its_beginning_or_end_begins_anew(left: str, tmp_path: Path, unfinished: Path) -> None:
    """What is left holds no finished block, or the output is in place already: never a reason to refuse."""
    if left in ("nothing", "first manifest"):
        shutil.rmtree(unfinished)
        (unfinished / ".quark-0123abcd.tmp").mkdir(parents=True)
        if left == "first manifest":
            (unfinished / ".quark-0123abcd.tmp" / "manifest.json").write_text('{"settings": ')
    if left in ("begun", "moved", "removed"):
        shutil.rmtree(unfinished / "model")
    if left == "removed":
        (unfinished / "inputs-1-0.safetensors").unlink()
    for overwrite in (False, True):
        found = streamed(scheme("int8"), tmp_path / "float", tmp_path / "out", token_batches(), overwrite=overwrite)
    assert found == streamed(scheme("int8"), tmp_path / "float", tmp_path / "whole", token_batches())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float", "out", "whole"]


def test_a_folder_in_which_another_run_works_is_refused(unfinished: Path) -> None:
    folder = unfinished.parent
    with in_use(unfinished), pytest.raises(ConfigError, match="Another run works in .*out.partial"):
        streamed(scheme("int8"), folder / "float", folder / "out", token_batches())
    assert (unfinished / "manifest.json").exists()


def test_a_folder_of_that_name_which_is_no_run_stays(unfinished: Path) -> None:
    folder = unfinished.parent
    (unfinished / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="is no folder of an unfinished run"):
        streamed(scheme("int8"), folder / "float", folder / "out", token_batches())
    assert (unfinished / "model").is_dir()


OTHER = {
    r"config\.global_quant_config\.weight\.dtype: \"int8\" there, \"fp8_e4m3\" now": {"config": scheme("fp8")},
    r"calibration data: \"\w+\" there": {"data": token_batches(2)},
    r"pack_method: \"reorder\" there, \"order\" now": {
        "target": FolderTarget(pack_method="order", max_shard_size="60KB")
    },
    r"custom_mode: \"quark\" there, \"compressed-tensors\" now; reader: \"transformers\" there, \"vllm\" now": {
        "target": FolderTarget("compressed-tensors", max_shard_size="60KB", reader="vllm")
    },
    r"max_shard_size: \"60KB\" there, \"70KB\" now": {"target": FolderTarget(max_shard_size="70KB")},
    r"config\.exclude: ": {"config": scheme("int8", exclude_layers=["lm_head", "*.o_proj"])},
}


@pytest.mark.parametrize("said", OTHER)
def test_other_settings_are_refused(said: str, unfinished: Path) -> None:
    begun = {"config": scheme("int8"), "data": token_batches(), "target": FolderTarget(max_shard_size="60KB")}
    settings = {**begun, **OTHER[said]}
    folder = unfinished.parent
    with pytest.raises(ConfigError, match=said):
        stream(source=OpenedFolder(folder / "float"), output=folder / "out", **settings)
    assert (unfinished / "manifest.json").exists()


def test_another_model_of_the_same_shapes_is_refused(unfinished: Path) -> None:
    folder = unfinished.parent
    shutil.rmtree(folder / "float")
    save_float(folder / "float", torch.float32, seed=1)
    with pytest.raises(ConfigError, match="model: "):
        streamed(scheme("int8"), folder / "float", folder / "out", token_batches())


@pytest.mark.parametrize("what", ["block", "inputs", "manifest"])
def test_damage_is_found(what: str, unfinished: Path) -> None:
    manifest = unfinished / "manifest.json"
    if what == "manifest":
        manifest.write_text(manifest.read_text()[:-50])
    elif what == "inputs":
        (unfinished / "inputs-1-0.safetensors").unlink()
    else:
        for file in (unfinished / "model").glob("*.safetensors"):
            data = file.read_bytes()
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    folder = unfinished.parent
    with pytest.raises(
        FormatError, match={"manifest": "corrupt", "inputs": "inputs-1", "block": "has changed since"}[what]
    ):
        streamed(scheme("int8"), folder / "float", folder / "out", token_batches())


def test_a_model_of_one_block_is_streamed(tmp_path: Path) -> None:
    """What a whole model returns is no tensor, and nothing needs it."""
    torch.manual_seed(0)
    sizes: Any = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
    ResNetForImageClassification(ResNetConfig(**sizes, num_labels=3)).save_pretrained(tmp_path / "float")
    data = [{"pixel_values": torch.randn(1, 3, 32, 32)} for _ in range(2)]
    model = ResNetForImageClassification.from_pretrained(tmp_path / "float")
    export_safetensors(ModelQuantizer(scheme("int8")).quantize_model(model, data), tmp_path / "whole")
    stream(scheme("int8"), OpenedFolder(tmp_path / "float"), tmp_path / "streamed", data)
    assert contents(tmp_path / "streamed") == contents(tmp_path / "whole")


def test_an_error_that_nobody_foresaw_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise AttributeError("unforeseen")

    source = save_float(tmp_path / "float")
    monkeypatch.setattr(Manifest, "finish", fails)
    with pytest.raises(AttributeError):
        stream(scheme("int8_wo"), OpenedFolder(source), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["float"]


def test_a_disk_that_fills_midway_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, finish = save_float(tmp_path / "float"), Manifest.finish

    def fails(self: Any, *args: Any) -> None:
        if self.begun:
            raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "out.partial" / "model"))
        finish(self, *args)

    monkeypatch.setattr(Manifest, "finish", fails)
    with pytest.raises(OutputError, match=r"out\.partial/model: No space left on device"):
        stream(scheme("int8_wo"), OpenedFolder(source), tmp_path / "out")
    assert (tmp_path / "out.partial").is_dir() and not (tmp_path / "out").exists()


# What is refused. ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_streaming_cannot_do(tmp_path: Path) -> None:
    source = save_float(tmp_path / "float")
    with pytest.raises(CalibrationError, match="needs calibration data"):
        streamed(scheme("int8"), source, tmp_path / "a")
    with pytest.raises(CalibrationError, match="GPTQConfig.*needs calibration data"):
        streamed(scheme("uint4_wo_32", [GPTQ]), source, tmp_path / "b")
    with pytest.raises(NotSupportedError, match=r"lm_head\.input has a static scale and lies outside the blocks"):
        streamed(scheme("int8", exclude_layers=[]), source, tmp_path / "c", token_batches())
    with pytest.raises(NotSupportedError, match="RotationConfig needs the whole model"):
        streamed(scheme("uint4_wo_32", [RotationConfig()]), source, tmp_path / "e", token_batches())
    assert [path.name for path in tmp_path.iterdir()] == ["float"]
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("")
    with pytest.raises(OutputExistsError):
        streamed(scheme("int8_wo"), source, tmp_path / "there")
    (tmp_path / "d.partial").mkdir()
    (tmp_path / "d.partial" / "thesis.txt").write_text("")
    with pytest.raises(ConfigError, match="no folder of an unfinished run"):
        streamed(scheme("int8_wo"), source, tmp_path / "d")
    assert json.loads((source / "config.json").read_text())["model_type"] == "llama"


# Blocks that visit the device. --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["static activations", "shared scales", "GPTAQ, static activations", "Qronos by Fisher information"]
)
def test_per_block_gives_what_the_standard_flow_gives(case: str) -> None:
    config, _ = CASES[case]
    one, other = (tiny_llama(dtype=torch.float32) for _ in range(2))
    ModelQuantizer(config).quantize_model(one, token_batches())
    per_block = replace(config, quant_flow=QuantFlow.per_block, gpu_resident_blocks=1)
    ModelQuantizer(per_block).quantize_model(other, token_batches())
    expected, found = one.state_dict(), other.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_resident_blocks_need_the_flow() -> None:
    with pytest.raises(ConfigError, match="gpu_resident_blocks=2 is for quant_flow"):
        replace(scheme("int8"), gpu_resident_blocks=2)
