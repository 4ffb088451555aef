"""The benchmark of what installs beside quark: what it asks of uv, and what it reads from the answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from packaging.requirements import Requirement

from benchmarks import environments as program
from benchmarks.environments import Answer, Blocked, Row

PROJECT = """
[project]
dependencies = ["typer>=0.27", "rich"]
[project.optional-dependencies]
torch = ["huggingface_hub>=1.31"]
onnx = ["onnxruntime>=1.23; python_version < '3.11'", "onnxruntime>=1.30; python_version >= '3.11'"]
"""
NONE = "No solution found: because tool==2 depends on\n  typer==0.25.1 ..."


class Index:
    """A resolver for `tool`, whose release 2 takes old versions of two packages, and release 1 any."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, lines: Sequence[str]) -> Answer:
        self.asked.append([*lines])
        if "tool==2" not in lines:
            return {"tool": "1", "typer": "0.29", "huggingface-hub": "2.4"}
        return NONE if {"typer>=0.27", "huggingface_hub>=1.31"} & {*lines} else {"tool": "2", "typer": "0.25.1"}


def test_requirements_are_those_of_the_package_and_of_its_extras() -> None:
    required = program.required(PROJECT, ["torch"])
    assert [str(one) for one in required] == ["typer>=0.27", "rich", "huggingface_hub>=1.31"]


def test_other_bounds_take_the_place_of_those_of_a_package_however_it_is_spelled() -> None:
    required = program.replaced(program.required(PROJECT, ["torch"]), ["huggingface-hub>=1.5"])
    assert [str(one) for one in required] == ["typer>=0.27", "rich", "huggingface-hub>=1.5"]
    with pytest.raises(ValueError, match="does not require numpy"):
        program.replaced(required, ["numpy>=2"])


def test_names_without_bounds_keep_their_markers_and_one_bound() -> None:
    lower, upper = program.required(PROJECT, ["onnx"])[2:]
    assert program.without_bounds([lower, upper], upper) == ['onnxruntime; python_version < "3.11"', str(upper)]


def test_each_bound_in_the_way_is_named_with_what_is_taken_without_it() -> None:
    index = Index()
    row = program.row_of(program.required(PROJECT, ["torch"]), "tool", "2", index)
    assert (row.resolves, row.free) == (False, "1")
    assert row.blocked == (Blocked("typer>=0.27", "0.25.1"), Blocked("huggingface_hub>=1.31", "none"))
    assert row.reason == "typer>=0.27 (0.25.1 without a bound), huggingface_hub>=1.31 (none without a bound)"
    assert index.asked[-1] == ["typer", "rich", "huggingface_hub>=1.31", "tool==2"]


def test_a_program_that_fits_is_asked_for_twice() -> None:
    index = Index()
    row = program.row_of([Requirement("typer")], "tool[hf]", "1", index)
    assert row == Row("tool[hf]", "1", {"tool": "1", "typer": "0.29", "huggingface-hub": "2.4"}, "1")
    assert index.asked == [["typer", "tool[hf]==1"], ["typer", "tool[hf]"]]


def test_what_is_in_the_way_without_any_bound_is_said_in_the_words_of_uv() -> None:
    row = program.row_of([Requirement("typer>=0.27")], "tool", "2", lambda lines: NONE)
    assert (row.free, row.blocked) == ("-", ())
    assert row.reason == "No solution found: because tool==2 depends on typer==0.25.1 ..."


def test_versions_are_read_from_the_lines_of_uv() -> None:
    output = "huggingface-hub==2.4.0\ntransformers[torch]==5.20.2\n# torch==1\n    # via torch==2\nnumpy==2.5.5"
    assert program.chosen(output) == {"huggingface-hub": "2.4.0", "transformers": "5.20.2", "numpy": "2.5.5"}


def test_the_newest_release_is_read_from_the_sentence_that_refuses_more() -> None:
    # As uv 0.13.9 words it, also over two lines.
    assert program.last_of_index("Because only tool[hf]<=0.48.0rc1 is\n   available and you require") == "0.48.0rc1"
    with pytest.raises(ValueError, match=r"names no newest release: no such package"):
        program.last_of_index("no such\n package")


def test_a_newest_release_is_no_pre_release(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Answer] = {"tool>=99999": "only tool<=3.0rc1 is available", "tool": {"tool": "2.1"}}
    monkeypatch.setattr("shutil.which", lambda name, path: name)
    monkeypatch.setattr(program.Uv, "resolve", lambda self, lines, *options: answers[lines[0]])
    assert program.Uv("3.12").newest("tool[hf]") == "2.1"
    answers["tool>=99999"] = "only tool<=3.0 is available"
    assert program.Uv("3.12").newest("tool[hf]") == "3.0"


def test_without_uv_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    with pytest.raises(ValueError, match="pip install uv"):
        program.Uv("3.12")


def test_what_differs_from_what_is_expected_is_wrong() -> None:
    (apart,) = program.EXPECTED
    rows = [Row("tool", "2", NONE, "1"), Row("other", "2", {"other": "2"}, "2"), Row(apart, "1", NONE, "-")]
    assert program.unexpected(rows) == ["tool 2 does not install beside quark"]
    assert program.unexpected([Row(apart, "1", {apart: "1"}, "1")]) == [
        f"{apart} resolves, which EXPECTED says it does not"
    ]


def test_the_table_has_a_row_for_each_program() -> None:
    row = Row("tool", "2", {"torch": "2.14", "typer": "0.25.1"}, "1")
    cells = [[*column.cells] for column in program.table_of([row, Row("none", "3", NONE, "-")], "title").columns]
    assert [first for first, _ in cells] == ["tool", "2", "yes", "2.14", "-", "-", "-", "-", "-", "0.25.1", "1"]
    assert [second for _, second in cells] == ["none", "3", "NO", *["-"] * 8]
