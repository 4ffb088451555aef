"""Points of a chart of text stand where their figures are, with names that hide none of them."""

from __future__ import annotations

import math

import pytest

from quark.base.command_line import Results, results
from quark.report.text_chart import text_chart, unbeaten

LOSSES = [
    ("int2", 10.0, 1.0), ("int8", 70.0, 0.0001), ("int8_wo", 70.0, 0.0001), ("int4", 31.0, 0.01), ("fp4", 30.0, 0.1),
    ("none", 20.0, math.nan), ("equal", 20.0, 0.0),
]  # fmt: skip


def test_points_stand_at_their_size_and_loss() -> None:
    assert text_chart(LOSSES, "Loss", "MB", log=True, marked={"int4"}).splitlines() == [
        "Loss",
        "       1 |o int2",
        "         |",
        "         |                      o fp4",
        "    0.01 |                       * int4",
        "         |",
        "         |",
        "  0.0001 |                                                     int8, int8_wo o",
        "         +--------------------------------------------------------------------",
        "          10                                                             70 MB",
    ]


def test_a_marked_point_has_its_name_first_and_one_without_room_has_none() -> None:
    crowd = [(f"scheme{number}", 10.0 + number / 67, 5.0) for number in range(68)]
    field = text_chart(crowd, "", "MB", log=False, marked={"scheme0"}).splitlines()[7]
    assert field == "       5 |*" + "o" * 67, "names hide no points"
    ends = [("first" * 8, 0.0, 5.0), ("last" * 8, 1.0, 5.0)]
    for index, marks in enumerate(("*o", "o*")):
        name = ends[index][0]
        field = text_chart(ends, "", "MB", log=False, marked={name}).splitlines()[7]
        inside = f" {name}".ljust(66) if index == 0 else f"{name} ".rjust(66)
        assert field == f"       5 |{marks[0]}{inside}{marks[1]}"


def test_where_there_is_one_place_there_is_no_chart() -> None:
    same = [("int4", 5.0, 0.1), ("chosen", 5.0, 0.1), ("worse", 6.0, math.inf)]
    assert text_chart(same, "Loss", "MB", log=True, marked={"chosen"}) == ""


def test_a_scheme_is_beaten_by_one_that_is_no_larger_and_no_worse() -> None:
    assert unbeaten(LOSSES[:5], low_is_best=True) == {"int2", "int8", "int8_wo", "int4", "fp4"}
    rows = [("a", 1.0, 20.0), ("b", 1.0, 25.0), ("c", 2.0, 25.0), ("d", 3.0, 30.0), ("e", 0.5, math.nan)]
    assert unbeaten(rows, low_is_best=False) == {"b", "d"}
    assert unbeaten(rows, low_is_best=True) == {"a"}


def test_json_has_the_table_and_no_chart(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    results().draw("")
    results().draw("1 |* int4")
    assert capsys.readouterr().out == "1 |* int4\n"
    monkeypatch.setattr(Results, "collected", {"tables": [], "lines": []})
    results().draw("1 |* int4")
    assert Results.collected == {"tables": [], "lines": []}
