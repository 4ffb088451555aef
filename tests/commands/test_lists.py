"""What can be looked up: schemes, algorithms, formats, versions; and the words that stand anywhere on the line."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quark.__version__ import __version__
from quark.base.log import logger
from quark.core.schemes import SCHEMES
from quark.gguf import MIXES
from quark.goals import GOALS
from quark.onnx.config.preset_rows import QROWS, ROWS
from tests.commands.program import quark


def tables(*line: str) -> list[dict[str, Any]]:
    done = quark(*line, "--json")
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)["tables"]
    return found


def test_schemes_are_those_of_both_flows() -> None:
    folder, onnx = tables("schemes")
    assert [row["scheme"] for row in folder["rows"]] == [*SCHEMES, *MIXES]
    assert [row["configuration"] for row in onnx["rows"]] == [*ROWS, *QROWS]
    assert next(row for row in onnx["rows"] if row["configuration"] == "U8S8_AAWS")["weight"] == "QInt8"


@pytest.mark.parametrize("goal", GOALS)
def test_schemes_of_a_goal_are_its_facts(goal: str) -> None:
    rows = [(row["scheme"], row["format"]) for table in tables("schemes", "--for", goal) for row in table["rows"]]
    row = GOALS[goal]
    kinds = [onnx for onnx in (False, True) if row.defaults(onnx)]
    assert sorted(rows) == sorted((fact.scheme, fact.form) for onnx in kinds for fact in row.facts(onnx))


def test_algorithms_show_their_parameters() -> None:
    folder, onnx = tables("algorithms")
    of_folder = {row["algorithm"]: row["parameters"] for row in folder["rows"]}
    assert "refine_passes=1" in of_folder["gptq"] and "svd_rank=32" in of_folder["svdquant"]
    assert "cle_steps=1" in {row["algorithm"]: row["parameters"] for row in onnx["rows"]}["cle"]


def test_formats_name_who_loads_them() -> None:
    rows = {row["format"]: row["loaded by"] for row in tables("formats")[0]["rows"]}
    assert "llama.cpp" in rows["gguf"] and "vLLM" in rows["awq"] and rows["gptq"] is None


def test_doctor_names_what_is_missing_and_the_line_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module("quark.commands.doctor")
    real = module.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "gguf" else real(name))
    packages, machine = tables("doctor")
    rows = {row["what"]: row for row in packages["rows"]}
    assert rows["onnxruntime"]["found"] == metadata.version("onnxruntime")
    assert (rows["gguf"]["found"], rows["gguf"]["what to do"]) == ("missing", "pip install 'openquark[gguf]'")
    assert rows["quark"]["what to do"] is None
    assert "cpu" in {row["device"] for row in machine["rows"]}
    monkeypatch.setattr(module, "other_version", lambda site: "0.13")
    assert "amd-quark 0.13 is installed in the same environment" in tables("doctor")[0]["rows"][0]["what to do"]


@pytest.mark.parametrize(
    ("version", "driver", "asked"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", True, False),
        ("cuda = None\nhip = None\n", True, False),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True, True),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", False, False),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.1'\n", False, True),
        (None, False, True),
    ],
)
def test_doctor_asks_torch_for_devices_only_where_it_may_find_some(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str | None, driver: bool, asked: bool
) -> None:
    """None: a build without the file."""
    module: Any = importlib.import_module("quark.commands.doctor")

    def load(name: str) -> None:
        if not driver:
            raise OSError(name)

    if version is not None:
        (tmp_path / "version.py").write_text(version)
    monkeypatch.setattr(module, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    monkeypatch.setattr(module.ctypes, "CDLL", load)
    monkeypatch.setattr(module.sys, "platform", "linux")
    assert module.may_have_accelerator() is asked


@pytest.mark.slow
def test_doctor_of_a_machine_without_a_gpu_does_not_load_torch() -> None:
    code = (
        "import importlib, sys; doctor = importlib.import_module('quark.commands.doctor'); "
        "doctor.may_have_accelerator = lambda: False; doctor.doctor(); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "cpu" in done.stdout, done.stderr


def test_version() -> None:
    assert quark("--version").out == f"quark {__version__}\n"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("plan {model} --scheme int4", 2),
        ("plan {model} --scheme int8_wo --exclude *.nothing", 1),
        ("plan {model} --for vllm --scheme mx9", 1),
        ("plan {model} --for vlm", 2),
        ("plan {model} --for vllm --effort bst", 2),
        ("plan {model} --effort best", 2),
        ("plan {model} --unknown", 2),
        ("quantize {model} --scheme int8_wo --algorithm gtpq -o out", 2),
        ("quantize {model} --scheme int8_wo --export-format ggfu -o out", 2),
        ("schemes --for vlm", 2),
    ],
)
def test_exit_codes(line: str, code: int) -> None:
    done = quark(*line.format(model="examples/models/language_model").split())
    assert done.code == code and done.err.count("\n") == 1, done


@pytest.mark.slow
def test_a_misspelt_or_missing_name_is_answered_before_torch_is_imported() -> None:
    heavy = ("torch", "transformers", "onnx", "onnxruntime")
    code = f"""
import sys
from quark.cli import main
try:
    main()
finally:
    print([name for name in {heavy} if name in sys.modules])
"""
    for word in ("--scheme int4", "--for vlm", "--for vllm --scheme mx9", ""):
        line = ["plan", "examples/models/language_model", *word.split()]
        done = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True, check=False)
        assert done.returncode in (1, 2) and done.stderr.count("\n") == 1 and done.stdout == "[]\n", done


def test_quiet_and_verbose_set_the_log(tmp_path: Path) -> None:
    level, line = logger.level, ("quantize", "examples/models/digits_cnn/model.onnx", "--config", "BF16", "-o")
    assert "QUARK-INFO" in quark(*line, tmp_path / "a.onnx").log
    assert quark(*line, tmp_path / "b.onnx", "--quiet").log == ""
    assert "QUARK-INFO" in quark(*line, tmp_path / "c.onnx", "--verbose").log
    assert logger.level == level


def test_json_keeps_names_that_look_like_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    from quark.base.command_line import new_table, program, results, run

    def show() -> None:
        """Print."""
        table = new_table("name", "size")
        for cells in (("1e999", "2.50"), ("null", "3"), ("", "-4"), ("[1]", "true")):
            table.add_row(*cells)
        results().print(table)
        results().print("done")

    run(program(show), "tool", ["--json"])
    found = json.loads(capsys.readouterr().out)
    values = [(row["name"], row["size"]) for row in found["tables"][0]["rows"]]
    assert values == [("1e999", 2.5), ("null", 3), (None, -4), ("[1]", "true")] and found["lines"] == ["done"]
