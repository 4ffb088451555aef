"""What an adapter says of itself is looked at before its base is loaded, so that a plan finds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quark.errors import FormatError
from quark.torch.flows.adapters import CONFIG, WEIGHTS, base_of


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter of one tensor; its base has a config."""
    for name in ("adapter", "base"):
        (tmp_path / name).mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "adapter" / CONFIG).write_text('{"base_model_name_or_path": "../base"}')
    save_file({"x": torch.ones(1)}, tmp_path / "adapter" / WEIGHTS)
    return tmp_path / "adapter"


def test_the_base_is_found_from_the_adapter(adapter: Path) -> None:
    assert base_of(adapter).path == adapter.parent / "base"


@pytest.mark.parametrize("name", ["owner/name", "../adapter", "a\0b", "https://example.com/x", "", 3])
def test_a_base_is_a_folder_of_a_model(adapter: Path, name: object) -> None:
    (adapter / CONFIG).write_text(json.dumps({"base_model_name_or_path": name}))
    with pytest.raises(FormatError, match="no model folder is there|names no base model"):
        base_of(adapter)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_its_files_are_whole_and_its_own(adapter: Path, name: str) -> None:
    kept = (adapter / name).rename(adapter.parent / "elsewhere")
    (adapter / name).symlink_to(kept)
    with pytest.raises(FormatError, match="out of its folder"):
        base_of(adapter)
    (adapter / name).unlink()
    with pytest.raises(FormatError, match=r"cannot be read|not JSON"):
        base_of(adapter)
    (adapter / name).write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"truncated|not JSON"):
        base_of(adapter)
