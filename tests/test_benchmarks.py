"""The table of `make bench`: its parts, and what it calls worse than the last release."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import __main__ as program
from benchmarks import solver_peers
from benchmarks.cases import solvers
from benchmarks.figures import FIGURES, PARTS, Figure
from benchmarks.stored import load, store, worse

TIME, SECONDS = Figure("case", "time", ("a", "time"), 2.0), Figure("case", "seconds", ("a", "time"), 2.0, " s")
SHARE = Figure("case", "share", ("a", "time"), 2.0, over=("a", "base"))


def result(time: float) -> dict[str, Any]:
    return {"case": {"a": {"time": time, "base": 4.0}}}


def test_each_figure_has_a_part_and_each_case_a_script() -> None:
    cases = {case for cases in PARTS.values() for case in cases}
    assert {figure.case for figure in FIGURES} == cases
    assert all((program.CASES / f"{case}.py").exists() for case in cases - set(program.MODULES))
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
    file.write_text('{"gone": 1.0}')
    store([figure], {figure.case: {"ratio": 1.23456}}, file)
    assert load(file) == {figure.key: 1.235}
    store([figure], {figure.case: None}, file)
    assert load(file) == {figure.key: 1.235}


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
