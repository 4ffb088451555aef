"""The table of `make bench`: its parts, and what it calls worse than the last release; that of `make gpu`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as program
from benchmarks import gpu, solver_peers
from benchmarks.cases import solvers
from benchmarks.figures import FIGURES, PARTS, Figure
from benchmarks.gpu_parts.contracts import SOLVED, TIES, judged
from benchmarks.gpu_parts.rows import Found, Report
from benchmarks.stored import FILE, KINDS, kind_of_machine, load, store, worse
from quark.core.solvers.columns.block_solvers import SOLVERS
from quark.core.solvers.columns.kernels import Kernels
from tests.pretended_gpu import PretendedGpu

TIME, SECONDS = Figure("case", "time", ("a", "time"), 2.0), Figure("case", "seconds", ("a", "time"), 2.0, " s")
SHARE = Figure("case", "share", ("a", "time"), 2.0, over=("a", "base"))


def result(time: float) -> dict[str, Any]:
    return {"case": {"a": {"time": time, "base": 4.0}}}


def test_each_figure_has_a_part_and_each_case_a_script() -> None:
    cases = {case for cases in PARTS.values() for case in cases}
    assert {figure.case for figure in FIGURES} == cases
    scripts = [program.SCRIPTS.get(case, [f"{case}.py"])[0] for case in cases - set(program.MODULES)]
    assert all((program.CASES / script).exists() for script in scripts)
    assert len({figure.key for figure in FIGURES}) == len(FIGURES)


def test_a_figure_is_a_place_in_a_result() -> None:
    assert TIME.value(result(3.0)["case"]) == 3.0
    assert SHARE.value(result(3.0)["case"]) == 0.75
    assert TIME.value({"a": {}}) is None
    assert TIME.value(None) is None


def test_what_has_grown_is_worse_and_seconds_are_not_compared() -> None:
    before = {TIME.key: 2.0}
    assert worse([TIME, SECONDS], result(2.09), before) == []
    (found,) = worse([TIME, SECONDS], result(2.2), before)
    assert (found.figure, found.now, found.before) == (TIME, 2.2, 2.0)
    assert worse([TIME], {"case": None}, before)[0].now == float("inf")


def test_ratios_are_kept_but_for_figures_that_are_gone(tmp_path: Path) -> None:
    file, figure = tmp_path / "ratios.json", FIGURES[0]
    file.write_text(json.dumps({kind: {"gone": 1.0, figure.key: 2.0} for kind in KINDS}))
    store([figure], {figure.case: {"ratio": 1.23456}}, file)
    here = kind_of_machine()
    (other,) = {*KINDS} - {here}
    assert load(file) == {figure.key: 1.235}
    store([figure], {figure.case: None}, file)
    assert load(file) == load(file, here) == {figure.key: 1.235}
    assert load(file, other) == {figure.key: 2.0}


def test_a_machine_is_of_one_of_two_kinds() -> None:
    assert kind_of_machine("flags : fpu avx512f amx_bf16 avx512_fp16 amx_tile amx_int8") == "AMX"
    assert kind_of_machine("flags : fpu avx512f avx512_bf16 amx_tile") == "no AMX"


def test_each_stored_ratio_is_one_of_a_figure() -> None:
    known = {figure.key for figure in FIGURES if figure.is_ratio}
    for kind, ratios in json.loads(FILE.read_text()).items():
        assert kind in KINDS and {*ratios} <= known, {*ratios} - known


def test_a_figure_is_worse_only_if_two_measurements_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    before, times = {TIME.key: 2.0}, iter([2.05, 3.0])
    monkeypatch.setattr(program, "run", lambda python, case: result(next(times))["case"])
    ours: program.Results = result(2.5)
    assert program.again(ours, [TIME], before) == []
    assert ours == result(2.05)
    assert program.again(result(2.5), [TIME], before)[0].now == 2.5


def test_parts_and_cases_are_named() -> None:
    assert program.cases_of(["onnx"]) == list(PARTS["onnx"])
    assert program.cases_of(["packing", "kernels", "packing"]) == ["packing", "kernels"]
    assert program.cases_of([]) == [case for cases in PARTS.values() for case in cases]
    with pytest.raises(ValueError, match="no part nonsense"):
        program.cases_of(["nonsense"])


def test_a_case_keeps_what_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept.py").write_text('import json, sys\nprint(json.dumps({"kept": not sys.dont_write_bytecode}))\n')
    monkeypatch.setattr(program, "CASES", tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert program.run(sys.executable, "kept") == {"kept": True}


def test_the_peer_does_not_see_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "where.py").write_text('import json, os\nprint(json.dumps({"path": os.environ.get("PYTHONPATH")}))\n')
    monkeypatch.setattr(program, "CASES", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "src")
    assert program.run(sys.executable, "where") == {"path": "src"}
    monkeypatch.setattr(program, "PEER", Path(sys.executable))
    assert program.run(sys.executable, "where") == {"path": None}


def test_each_row_beside_other_packages_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(program.CASES))  # as the interpreters of other packages find it
    foreign = importlib.import_module("foreign_solvers")
    own = {algorithm for package, algorithm in solver_peers.ROWS if package not in solver_peers.MADE}
    assert own <= set(solvers.CASES)
    assert set(foreign.WORK) == {f"{p} {algorithm}" for p, algorithm in solver_peers.ROWS if p in solver_peers.MADE}


# On a GPU. -----------------------------------------------------------------------------------------------------------


def run_gpu(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    return gpu.main()


def test_a_machine_without_a_gpu_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_gpu(monkeypatch) == 1
    assert capsys.readouterr().out == "This machine has no GPU that PyTorch sees: nothing was run.\n"


@pytest.mark.slow
def test_each_part_runs_on_a_pretended_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose kernels of triton cannot run: the plain form is taken, and told."""
    (kernels,) = (solver for solver in SOLVERS if isinstance(solver, Kernels))
    monkeypatch.setattr(kernels.trust, "refused", set())
    cases = (
        "smooth int8 float32",
        "s: ptpc_fp8 bfloat16",
        "generate",
        "s: int4 group",
        "quantize int3",
        "copy",
        "plain form",
    )
    with PretendedGpu(where=False):
        code = run_gpu(monkeypatch, "--small", "--only", *cases)
    first, _, head, _, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("pretended, torch ") and first.endswith("small sizes")
    assert head == "| part | case | found | bound |  |"
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows if row.startswith("|")]
    found = {(part, case): rest for part, case, *rest in cells}
    verdicts = {name: rest[-1] for name, rest in found.items()}
    assert code == 0, verdicts
    assert verdicts["contracts", "smooth int8 float32"] == verdicts["contracts", "generate uint4_wo_32"] == "equal"
    assert {verdict for (part, _), verdict in verdicts.items() if part == "contracts"} <= {"equal", "within"}
    assert {verdict for (part, _), verdict in verdicts.items() if part == "kernels"} == {"plain form taken", "equal"}
    assert verdicts["ratios", "GPTQ of a block, plain form"] == "plain form"
    assert not kernels.trust.refused and found["ratios", "copy on the device"][0].endswith("GB/s")
    assert " fail, 0 were not run." in rows[-2] and rows[-1].endswith("--only leaves them out.")


def test_a_case_that_raises_ends_alone_and_late_ones_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    report = Report(torch.device("cpu"), limit=100.0, only=("a", "b"))

    def fails() -> Found:
        raise ValueError("a | b\nmore")

    report.run("part", "a", fails)
    report.run("part", "b", lambda: Found("0.5", "0.25", "BEYOND"))
    report.run("part", "ab", lambda: pytest.fail("begun"), needs=200.0)
    report.run("", "other", lambda: pytest.fail("run"))
    lines = report.table().splitlines()
    assert lines[2] == "| part | a | ValueError: a \\| b |  | FAILS |"
    assert lines[3] == "| part | b | 0.5 | 0.25 | BEYOND |"
    assert lines[4] == "| part | ab |  |  | not run: no time left |"
    assert report.failed() == 2 and report.skipped == 1


@pytest.mark.parametrize(("off", "share", "verdict"), [
    (0.0, 0.0, "equal"), (1e-6, 0.0, "within"), (1e-3, 0.0, "BEYOND"), (1e-3, TIES, "within"), (0.2, TIES, "BEYOND"),
    (float("nan"), SOLVED, "BEYOND"), (0.12, SOLVED, "BEYOND"),
])  # fmt: skip
def test_logits_are_held_against_sums_and_the_loss(off: float, share: float, verdict: str) -> None:
    """A loss of a tenth; what is solved may not lose a quarter more, even where it is near."""
    base = torch.ones(100)
    host = base * 1.1
    assert judged(host + 1.1 * off, host, base, 1e-5, share).verdict == verdict
