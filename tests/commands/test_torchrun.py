"""`quark quantize` under torchrun: the bytes of one process, and each word said once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quark.base import command_line
from quark.errors import NotSupportedError, UsageError
from quark.jobs.processes import refuse_processes, together

MODEL = Path("examples/models/language_model").resolve()
TEXT = Path("examples/models/text/calibration.txt").resolve()
DATA = ["--samples", "2", "--length", "64", "--calib", str(TEXT)]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


def quark(*words: str, processes: bool) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *(TORCHRUN if processes else []), "quark", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--scheme", "mxfp4", "--stream"],
        ["--scheme", "uint4_wo_32", "--algorithm", "gptq", *DATA],
        ["--scheme", "q8_0", "--export-format", "gguf"],
        ["--scheme", "q4_k_m", "--export-format", "gguf", "--stream", *DATA],
    ],
    ids=["file to file", "calibrated", "gguf, file to file", "gguf, streamed"],
)
def test_two_processes_write_the_bytes_of_one_and_one_speaks(options: list[str], tmp_path: Path) -> None:
    made = {}
    for count in (1, 2):
        out = tmp_path / str(count) / ("model.gguf" if "gguf" in options else "model")
        out.parent.mkdir()
        # Several processes measure nothing afterwards, so one of them has no figures in its card either.
        done = quark("quantize", str(MODEL), *options, "--no-verdict", "-o", str(out), processes=count == 2)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 1
        assert done.stderr.count("[QUARK-INFO]: Quantizing ") == 1
        made[count] = {file.name: file.read_bytes() for file in (out.iterdir() if out.is_dir() else [out])}
    assert made[1] == made[2]


@pytest.mark.slow
def test_a_wrong_word_is_said_once(tmp_path: Path) -> None:
    done = quark("quantize", str(MODEL), "--scheme", "mxfp5", "-o", str(tmp_path / "out"), processes=True)
    assert done.returncode == 1 and done.stderr.count("Unknown scheme 'mxfp5'") == 1


def test_what_one_process_makes_is_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "PATIENCE", 0.0)
    for name, value in {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    for onnx, form, files, named in (
        (True, "quark", {}, "an ONNX file"),
        (False, "comfyui", {}, "--export-format comfyui"),
        (False, "awq", {"log_file": Path("a")}, "--log-file"),
    ):
        with (
            pytest.raises(NotSupportedError, match=rf"{named} under torchrun \(4 processes\)"),
            together(onnx, form, **files),
        ):
            pass
    with pytest.raises(NotSupportedError):
        refuse_processes("quark convert")
    monkeypatch.setenv("WORLD_SIZE", "1")
    refuse_processes("quark convert")
    with together(True, "gguf"):
        pass


@pytest.mark.parametrize(("count", "worked"), [("1", []), ("2", [{"device": "cuda", "timeout": 9.0}])])
def test_several_processes_work_together(count: str, worked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def joined(**options: Any) -> Iterator[int]:
        seen.append(options)
        yield 0

    seen = list[Any]()
    monkeypatch.setattr("quark.torch.processes", joined)
    for name, value in {"WORLD_SIZE": count, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with together(False, "quark", "cuda", 9.0 if worked else None):
        assert seen == worked
    if not worked:
        with (
            pytest.raises(UsageError, match="--process-timeout 9: a process that is alone"),
            together(False, "a", "b", 9),
        ):
            pass


def test_other_processes_print_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command_line, "PATIENCE", 0.0)
    for rank, speaks in (("1", False), ("0", True)):
        for name, value in {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)

        def say(fail: bool = False) -> None:
            command_line.results().print("a result")
            if fail:
                raise NotSupportedError("what is wrong")

        command_line.run(command_line.program(say), arguments=[])
        assert bool(capsys.readouterr().out) is speaks
        with pytest.raises(SystemExit):
            command_line.run(command_line.program(say), arguments=["--fail"])
        assert bool(capsys.readouterr().err) is speaks
