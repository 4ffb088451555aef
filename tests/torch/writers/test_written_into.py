"""Folders that are there already: whose model is replaced, whose files stay, and what is refused."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from torch import nn

from quark.errors import OutputExistsError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder
from tests.models.torch_zoo import tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("written") / "float"
    tiny_llama().save_pretrained(place)
    (place / "tokenizer_config.json").write_text("of the float model")
    return place


@pytest.fixture(scope="module")
def quantizer() -> ModelQuantizer:
    return ModelQuantizer(LLMTemplate.get("llama").get_config("int8_wo"))


@pytest.fixture(scope="module")
def model(folder: Path, quantizer: ModelQuantizer) -> nn.Module:
    return quantizer.freeze(quantizer.quantize_model(load_float_model(OpenedFolder(folder))))


def test_a_script_that_runs_again_replaces_the_model_and_keeps_what_was_saved_there(
    model: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quark")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    for size, said in (("40KB", "Written into"), ("5GB", "Replaced the model in")):
        (tmp_path / "tokenizer_config.json").write_text("of the user")
        export_safetensors(model, tmp_path, max_shard_size=size)
        assert f"{said} {tmp_path}, where these files stay: " in caplog.text
        assert (tmp_path / "tokenizer_config.json").read_text() == "of the user"
        assert (tmp_path / "1_Pooling" / "config.json").read_text() == "{}"
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    export_safetensors(model, tmp_path)  # of which nobody has saved a tokenizer since
    assert (tmp_path / "tokenizer_config.json").read_text() == "of the float model"
    loaded = import_model_from_safetensors(None, tmp_path)
    loaded.save_pretrained(tmp_path.with_name("again"))
    loaded.save_pretrained(tmp_path.with_name("again"))


def test_a_config_that_a_script_copies_there_first_is_no_model(model: nn.Module, folder: Path, tmp_path: Path) -> None:
    for _ in range(2):
        shutil.copy2(folder / "config.json", tmp_path / "config.json")
        export_safetensors(model, tmp_path)
        assert "quantization_config" in (tmp_path / "config.json").read_text()
    shutil.copy2(folder / "config.json", tmp_path / "config.json")
    (tmp_path / "model.safetensors").rename(tmp_path / "tf_model.h5")
    with pytest.raises(OutputExistsError, match=r"quark did not write \(config.json\)"):
        export_safetensors(model, tmp_path)


def test_a_model_of_another_is_not_replaced_and_overwrite_false_replaces_none(
    model: nn.Module, folder: Path, quantizer: ModelQuantizer, tmp_path: Path
) -> None:
    tiny_llama().save_pretrained(tmp_path / "float")
    before = (tmp_path / "float" / "model.safetensors").read_bytes()
    with pytest.raises(OutputExistsError, match="a model that quark did not write"):
        export_safetensors(model, tmp_path / "float")
    assert (tmp_path / "float" / "model.safetensors").read_bytes() == before
    for _ in range(2):
        quantizer.direct_quantize_checkpoint(folder, tmp_path / "out")
    with pytest.raises(OutputExistsError, match="exists already"):
        export_safetensors(model, tmp_path / "out", overwrite=False)
    (tmp_path / "out" / "adapter_config.json").write_text("{}")
    with pytest.raises(OutputExistsError, match="a model that quark did not write"):
        export_safetensors(model, tmp_path / "out")


def test_a_folder_that_was_being_written_stays_as_it_was(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")

    def fail(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quark.torch.writers.folder.write_card", fail)
    with pytest.raises(OSError, match="No space left"):
        export_safetensors(model, tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "notes.txt"]
