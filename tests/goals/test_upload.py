"""The command that uploads what was made: the last line of the log at every door, taken by the hub's own client."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from huggingface_hub.cli import upload as client

import quark as package
from quark.goals.upload import upload_command
from tests.commands.program import quark
from tests.models.onnx_zoo import cnn, images
from tests.models.torch_zoo import LANGUAGE_MODEL, tiny_llama

FEEDS = {"x": np.concatenate([feed["x"] for feed in images()])}
WORDS = "[QUARK-INFO]: To put it on the Hugging Face hub: "


def sent(command: str) -> list[str]:
    """The names in the repository of what the client would send, as its own code finds paths and patterns."""
    program, verb, repository, place, *rest = shlex.split(command)
    assert (program, verb, repository) == ("hf", "upload", "USER/NAME")
    included = rest[2:] if rest else None
    assert rest[:2] in ([], [".", "--include"])
    local, inside, patterns = client._resolve_upload_paths(
        repo_id="USER/NAME", local_path=place, path_in_repo=rest[0] if rest else None, include=included
    )
    if Path(local).is_file():
        return [inside]
    from huggingface_hub.utils import filter_repo_objects

    files = [path.relative_to(local).as_posix() for path in Path(local).rglob("*") if path.is_file()]
    return sorted(f"{inside}/{name}".removeprefix("./") for name in filter_repo_objects(files, allow_patterns=patterns))


TAKES_BRACKETS = "os.path.exists" in inspect.getsource(client._resolve_upload_paths)
"""Clients before 2 take every path with brackets for a pattern, and send nothing."""


@pytest.mark.parametrize(
    "name",
    [
        "a model",
        pytest.param("a [quantized] model", marks=pytest.mark.skipif(not TAKES_BRACKETS, reason="an old client")),
    ],
)
def test_the_client_sends_what_was_made(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    (folder / "2_Dense").mkdir(parents=True)
    for name in ("config.json", "2_Dense/model.safetensors", "x.onnx", "x.onnx.data", "[y].onnx", "[y].onnx_data"):
        (folder / name).touch()
    assert sent(upload_command(folder)) == sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
    assert sent(upload_command(folder / "config.json")) == ["config.json"]
    assert sent(upload_command(folder / "x.onnx")) == ["x.onnx", "x.onnx.data"]
    assert sent(upload_command(folder / "[y].onnx")) == ["[y].onnx", "[y].onnx_data"]


Door = Callable[[Path], object]
DOORS: dict[str, tuple[str, Door]] = {
    "command": ("out", lambda out: quark("quantize", out.parent / "llama", "--scheme", "int8_wo", "-o", out).log),
    "recipe": ("out", lambda out: quark("run", out.parent / "recipe.yaml", "-o", out).log),
    "python": ("out", lambda out: package.quantize(out.parent / "llama", "int8_wo", output=out)),
    "module": ("out", lambda out: package.quantize(tiny_llama(), "int8_wo", output=out)),
    "GGUF file": (
        "out.gguf",
        lambda out: quark("quantize", LANGUAGE_MODEL, "--for", "llama.cpp", "--effort", "fast", "-o", out).log,
    ),
    "convert": (
        "out",
        lambda out: quark("convert", out.parent / "int8", "--format", "compressed-tensors", "-o", out).log,
    ),
    "convert, python": ("out", lambda out: package.convert(out.parent / "int8", out, "compressed-tensors")),
    "ONNX file": (
        "out.onnx",
        lambda out: (
            quark(
                "quantize", out.parent / "x.onnx", "--config", "A8W8", "--calib", out.parent / "samples.npz", "-o", out
            ).log
        ),
    ),
    "ONNX file, python": (
        "out.onnx",
        lambda out: package.quantize(out.parent / "x.onnx", "A8W8", data=FEEDS, output=out),
    ),
}
"""Name of a door -> what it makes, and the call; a command gives its log."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float folder, a quantized one, a recipe and an ONNX file."""
    root = tmp_path_factory.mktemp("places")
    tiny_llama().save_pretrained(root / "llama")
    package.quantize(root / "llama", "int8_wo", output=root / "int8")
    (root / "recipe.yaml").write_text(f"recipe: 1\nmodel: {root / 'llama'}\nscheme: int8_wo\n")
    onnx.save(cnn(), root / "x.onnx")
    np.savez(root / "samples.npz", x=FEEDS["x"])
    return root


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_the_log_of_every_door_ends_with_the_command(
    door: str, places: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, call = DOORS[door]
    out = places / f"{door.replace(' ', '-').replace(',', '')}-{name}"
    log = call(out)
    lines = (log if isinstance(log, str) else capfd.readouterr().err).splitlines()
    assert out.exists()
    assert lines[-1] == f"{WORDS}hf upload USER/NAME {out}" and sum(line.startswith(WORDS) for line in lines) == 1


@pytest.mark.slow
def test_nothing_is_said_under_quiet_or_of_what_was_not_made(places: Path) -> None:
    line = ("quantize", places / "llama", "--scheme", "int8_wo", "-o")
    assert quark(*line, places / "quiet", "--quiet").log == "" and (places / "quiet").exists()
    refused = quark(*line, places / "llama")
    assert refused.code == 1 and WORDS not in refused.log
