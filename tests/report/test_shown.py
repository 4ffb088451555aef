"""Results that show themselves: tables as text and as HTML, in which the names of models are text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quark.report.page import PageTable
from quark.report.shown import Shown


@dataclass(frozen=True, repr=False)
class Found(Shown):
    whole_model: object

    def tables(self) -> Sequence[PageTable]:
        return [PageTable(("layer", "SQNR dB"), [("<b>[red]x", "12.5")], "Layers & outputs")]


def test_a_result_is_its_tables_and_not_its_fields() -> None:
    found = Found("a model of a million characters")
    for text in (str(found), repr(found), found._repr_html_()):
        assert "million" not in text and "12.5" in text
    assert "<b>[red]x" in str(found)
    assert "&lt;b&gt;[red]x" in found._repr_html_() and "Layers &amp; outputs" in found._repr_html_()
