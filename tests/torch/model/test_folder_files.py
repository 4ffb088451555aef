"""A model folder is read, and copied from, no further than its own files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quark.errors import FormatError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.checkpoint.safetensors_file import TensorFile
from quark.torch.model.folder_files import INDEX, check_files, file_of, shard_files, side_files
from quark.torch.model.model_folder import read_config
from tests.models.torch_zoo import tiny_llama

CONFIG = {"model_type": "llama"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of one shard with an index, and a file beside it."""
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    path = tmp_path / "model"
    path.mkdir()
    save_file({"x": torch.ones(1)}, path / "model-1.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def write_index(folder: Path, *names: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", "C:\\x", "a\0"])
def test_an_index_names_files_of_its_folder_only(name: str, folder: Path) -> None:
    write_index(folder, "model-1.safetensors", name)
    for read in (shard_files, check_files, read_config):
        with pytest.raises(FormatError, match="which is outside the folder"):
            read(folder)


def test_an_index_may_name_what_no_system_has_room_for(folder: Path) -> None:
    write_index(folder, "model-1.safetensors", "x" * 300)
    check_files(folder)  # a plan needs no weights
    with pytest.raises(FormatError, match="which is not there"):
        shard_files(folder)


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": []}}', "[" * 100_000])
def test_a_damaged_index_is_named(content: str, folder: Path) -> None:
    (folder / INDEX).write_text(content)
    with pytest.raises(FormatError, match="is not a safetensors index"):
        shard_files(folder)


def test_a_link_out_of_the_folder_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to("/etc/passwd")
    for read in (side_files, check_files, read_config):
        with pytest.raises(FormatError, match=r"tokenizer\.json is a link to /etc/passwd, out of its folder"):
            read(folder)


def test_a_shard_that_is_a_link_out_of_the_folder_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to("../secret.safetensors")
    with pytest.raises(FormatError, match="out of its folder"):
        shard_files(folder)


def test_links_within_the_folder_and_links_to_the_folder_are_read(folder: Path) -> None:
    (folder / "model-2.safetensors").symlink_to("model-1.safetensors")
    write_index(folder, "model-2.safetensors")
    (folder.parent / "link").symlink_to(folder)
    assert shard_files(folder.parent / "link") == [folder.parent / "link" / "model-2.safetensors"]


def test_a_snapshot_of_the_cache_of_huggingface_is_read(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(("config.json", "tokenizer.json", "model.safetensors")):
        blob = blobs / f"{number:040x}"
        blob.write_text(json.dumps(CONFIG))
        (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
    assert read_config(snapshot) == CONFIG
    assert [file.name for file in shard_files(snapshot)] == ["model.safetensors"]
    assert [file.name for file in side_files(snapshot)] == ["tokenizer.json"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", INDEX])
def test_a_pipe_is_refused_and_not_waited_for(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(FormatError, match="a folder, a pipe or a device"):
        check_files(folder)
    with pytest.raises(FormatError, match="a folder, a pipe or a device"):
        import_model_from_safetensors(None, folder)
    with pytest.raises(FormatError, match="a folder, a pipe or a device"):
        TensorFile(folder / name)


def test_what_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read: No such file"):
        file_of(folder, "model-9.safetensors")
    write_index(folder, "model-9.safetensors")
    check_files(folder)  # a plan needs no weights
    with pytest.raises(FormatError, match=r"names model-9\.safetensors, which is not there"):
        shard_files(folder)


def test_every_file_of_a_tokenizer_travels_and_no_weight(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark.torch.model.folder_files._LARGEST", 100)
    wanted = ["bpe.codes", "dict.txt", "normalizer.json", "qwen.tiktoken", "source.spm", "tekken.json"]
    for name in [*wanted, "model.bin", "hf_quant_config.json", "generation_config.json", ".hidden", "x.index.json"]:
        (folder / name).write_text("{}")
    (folder / "large.txt").write_text(" " * 101)
    (folder / "logs").mkdir()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("x")
    assert [file.as_posix() for file in side_files(folder)] == [*wanted, "additional_chat_templates/tool.jinja"]
    (folder / "outside.codes").symlink_to("../secret.safetensors")
    for read in (side_files, check_files):
        with pytest.raises(FormatError, match="out of its folder"):
            read(folder)
    (folder / "config.json").unlink()
    assert side_files(folder) == [Path("additional_chat_templates/tool.jinja")]


def test_an_adapter_beside_the_weights_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(FormatError, match=r"holds an adapter \(adapter_config\.json\).*Merge the adapter first"):
        read_config(folder)


def test_the_export_copies_no_file_from_elsewhere(tmp_path: Path) -> None:
    model = tiny_llama()
    model.config._name_or_path = str(tmp_path / "source")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").symlink_to("/etc/passwd")
    ModelQuantizer(LLMTemplate.get("llama").get_config("int8_wo")).quantize_model(model)
    with pytest.raises(FormatError, match="out of its folder"):
        export_safetensors(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(FormatError, match=r"config\.json"):
        read_config(tmp_path)


def test_the_single_file_is_read_where_there_is_an_index_too(tmp_path: Path) -> None:
    """As transformers does; read otherwise, streaming took other weights than the model in memory."""
    for name in ("model.safetensors", "model-00001-of-00001.safetensors"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    assert [file.name for file in shard_files(tmp_path)] == ["model.safetensors"]


def test_a_limit_may_be_infinite_and_nothing_may_be_nan(folder: Path) -> None:
    """A norm with an epsilon of NaN makes every output NaN, which weights alone do not show."""
    (folder / "config.json").write_text('{"model_type": "llama", "limit": [0.0, Infinity]}')
    assert read_config(folder)["limit"] == [0.0, float("inf")]
    (folder / "config.json").write_text('{"model_type": "llama", "rms_norm_eps": NaN}')
    with pytest.raises(FormatError, match="the value NaN"):
        read_config(folder)


def test_a_name_that_occurs_twice_is_refused(folder: Path) -> None:
    """json takes the last, other readers the first: 2 layers here could be 4 there."""
    (folder / "config.json").write_text('{"model_type": "llama", "a": {"layers": 2, "layers": 4}}')
    with pytest.raises(FormatError, match=r"config\.json is not JSON: the name 'layers' occurs twice"):
        read_config(folder)
