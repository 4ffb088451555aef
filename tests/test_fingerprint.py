"""`make fingerprint`: outputs are found and repeatable, and one that changed is seen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fingerprint import __main__ as program
from benchmarks.fingerprint import outputs, worker
from quark.errors import ConfigError


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The list of outputs, empty, and a process less."""
    monkeypatch.setattr(outputs, "OUTPUTS", {})

    def in_process(patterns: list[str], jobs: int) -> Iterator[tuple[str, str]]:
        return ((n, outputs.fingerprint(n)) for n in sorted(outputs.OUTPUTS) if program.matches(n, patterns))

    monkeypatch.setattr(program, "fingerprints", in_process)
    monkeypatch.setattr(program, "ENVIRONMENT", {})
    yield outputs.OUTPUTS


NAMES = [
    "torch/layers/int8_wo",
    "torch/specs/Int8PerTensorSpec",
    "onnx/presets/A8W8/mlp",
    "onnx/options/PrintSummary",
    "onnx/algorithms/gptq_order",
    "onnx/tools/text",
    "command/wrong/scheme",
]


@pytest.mark.parametrize("name", NAMES)
def test_an_output_of_each_part_is_repeatable(name: str) -> None:
    found = worker.fingerprint(name)
    assert re.fullmatch("[0-9a-f]{16}", found)
    assert found == worker.fingerprint(name)
    assert name in worker.names()


def test_a_refusal_is_an_output() -> None:
    assert re.fullmatch("[0-9a-f]{16}  NothingToQuantizeError", worker.fingerprint("onnx/presets/MATMUL_NBITS/cnn"))


def write(text: str) -> None:
    (outputs.OUT / "file.txt").write_text(text)


def refuse(text: str) -> None:
    raise ConfigError(text)


KINDS: dict[str, Callable[[str], str | None]] = {"a/file": write, "a/refused": refuse, "b/text": str}


def test_differences_are_printed(made_up: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(tmp_path / "saved.txt")
    for name, output in KINDS.items():
        outputs.add(name, output, "before")
    assert program.main(["--save", saved]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["a/file", "a/refused", "b/text"]
    assert program.main(["--compare", saved]) == 0 and capsys.readouterr().out == ""
    for name, output in KINDS.items():
        made_up.clear()
        outputs.add(name, output, "after")
        assert program.main(["--compare", saved, "--only", name]) == 1
        before, after = capsys.readouterr().out.splitlines()
        assert before.startswith(f"- {name}  ") and after.startswith(f"+ {name}  ") and before[1:] != after[1:]
    made_up.clear()
    assert program.main(["--compare", saved, "--only", "a/*"]) == 1
    assert [line[:4] for line in capsys.readouterr().out.splitlines()] == ["- a/"] * 2


def test_names_and_bytes_of_files_count(tmp_path: Path) -> None:
    found = set()
    for name, content in (("a", "x"), ("b", "x"), ("a", "y")):
        (tmp_path / name).write_text(content)
        found.add(outputs.digest(tmp_path))
        (tmp_path / name).unlink()
    assert len(found) == 3
