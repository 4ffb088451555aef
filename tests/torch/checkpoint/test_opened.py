"""A model folder is opened once: what was read of it is known, and its model without weights stays as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.errors import FormatError
from quark.torch import LLMTemplate
from quark.torch.checkpoint import opened as module
from quark.torch.checkpoint.opened import OpenedFolder, opened_from
from quark.torch.flows.predicted_size import plan_of
from quark.torch.model.passes import UnfusedExperts
from tests.models.families import MOE, family
from tests.models.torch_zoo import tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_everything_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times: dict[str, int] = {}

    def counted(name: str) -> Any:
        real = getattr(module, name)

        def call(*arguments: Any) -> Any:
            times[name] = times.get(name, 0) + 1
            return real(*arguments)

        return call

    for name in ("read_config", "load_config", "build_skeleton", "source_names", "dropped_names", "TensorFile"):
        monkeypatch.setattr(module, name, counted(name))
    opened = OpenedFolder(folder)
    for _ in range(2):
        opened.check()
        assert opened.names(opened.copy()) is opened.names(opened.skeleton)
        assert not opened.dropped(opened.skeleton) and opened.source.names() and opened.metas
        plan_of(opened, LLMTemplate.get("auto").get_config("int8_wo"), "quark")
    assert set(times.values()) == {1}, times


def test_a_copy_is_another_model_with_the_ties_of_the_first(folder: Path) -> None:
    opened = OpenedFolder(folder)
    copy, own = opened.copy(), {id(x) for x in opened.skeleton.parameters()}
    assert copy.lm_head.weight is copy.model.embed_tokens.weight and copy.lm_head.weight.is_meta
    assert own.isdisjoint(id(x) for x in copy.parameters()) and not copy.training
    assert {n: x.dtype for n, x in copy.state_dict().items()} == {
        n: x.dtype for n, x in opened.skeleton.state_dict().items()
    }


def test_a_plan_takes_a_copy_apart(tmp_path: Path) -> None:
    family(next(iter(MOE))).save_pretrained(tmp_path)
    opened = OpenedFolder(tmp_path)
    plan = plan_of(opened, LLMTemplate.get("auto").get_config("int8_wo"), "quark")
    apart = [any(isinstance(m, UnfusedExperts) for m in model.modules()) for model in (plan.meta, opened.skeleton)]
    assert apart == [True, False] and 0 < plan.after < plan.before


def test_a_config_without_a_dtype_has_that_of_the_files(folder: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")})
    )
    assert OpenedFolder(folder).dtype == torch.float16 == next(OpenedFolder(folder).skeleton.parameters()).dtype


def test_a_folder_may_be_without_weights_and_not_with_damaged_ones(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.unlink()
    opened = OpenedFolder(folder)
    assert not opened.metas_if_any and opened.source_if_any is None and opened.skeleton is not None
    opened.check()
    with pytest.raises(FormatError, match="holds neither"):
        opened.source  # noqa: B018
    file.write_bytes(content[:200])
    with pytest.raises(FormatError, match="no safetensors file"):
        OpenedFolder(folder).check()


def test_a_model_knows_its_folder(folder: Path) -> None:
    found = opened_from(OpenedFolder(folder).skeleton)
    assert found is not None and found.path == folder
    assert opened_from(tiny_llama()) is None
