"""What a list of modules names lies in its folder, and so does all that is copied with it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from quark.errors import FormatError
from quark.jobs.folders.sentence_encoders import around, model_of

KIND = "sentence_transformers.models.Transformer"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A list of a model and a pooling."""
    folder = tmp_path / "encoder"
    for name in ("0_Transformer", "1_Pooling", ".cache"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
    write(folder, "0_Transformer")
    return folder


def write(folder: Path, *paths: str) -> None:
    (folder / "modules.json").write_text(json.dumps([{"path": path, "type": KIND} for path in paths]))


def test_what_lies_around_the_model_is_copied(folder: Path, tmp_path: Path) -> None:
    with around(folder, tmp_path / "out", "quark", False) as (model, place):
        assert model == folder / "0_Transformer" and not place.exists()
        place.mkdir()
    made = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*"))
    assert made == ["0_Transformer", "1_Pooling", "1_Pooling/config.json", "modules.json"]


@pytest.mark.parametrize(
    "path", ["..", "../encoder/0_Transformer", "/etc", "0_Transformer/../1_Pooling", "", "no", "a\0"]
)
def test_the_model_is_a_folder_of_the_folder(folder: Path, path: str) -> None:
    write(folder, path)
    with pytest.raises(FormatError, match="outside the folder|not there"):
        model_of(folder)


def test_links_out_and_pipes_are_refused_before_anything_is_made(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    place = folder / "1_Pooling" / "more"
    for make in (
        lambda: place.symlink_to(tmp_path / "secret"),
        lambda: place.symlink_to("more"),
        lambda: os.mkfifo(place),
    ):
        make()
        with (
            pytest.raises(FormatError, match="out of its folder|broken link|a pipe"),
            around(folder, tmp_path / "out", "quark", False),
        ):
            pass
        place.unlink()
    assert {path.name for path in tmp_path.iterdir()} == {"encoder", "secret"}
