"""Pages: what models say stays text, nothing is fetched, and what cannot be written is found before the work."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from quark.errors import OutputError, OutputExistsError
from quark.report.page import Figure, PageTable, Section, check_page, render, write_page

EVIL = """</text></svg></table><script>alert(1)</script><img src=x onerror=alert(1)> --> $x_1$ & "q" 'q' #010203"""


class Seen(HTMLParser):
    """The tags, attributes and words of a page, as a parser of HTML reads them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words += data


def hostile_page() -> str:
    table = PageTable((EVIL, "b"), [(EVIL, "1")], EVIL)
    return render(EVIL, [Section(EVIL, EVIL, [table, PageTable(("a",), [(EVIL,)], EVIL, folded=True)])])


def test_names_of_models_are_no_markup() -> None:
    seen, harmless = Seen(hostile_page()), Seen(hostile_page().replace("script", "scrpt"))
    assert not {"script", "img", "svg"} & set(seen.tags) and seen.tags == harmless.tags
    assert seen.words.count(EVIL) == 10, "title, heading, link, part, text, header, cell, two titles of tables, cell"


def test_a_page_fetches_nothing_and_runs_nothing() -> None:
    page = hostile_page()
    seen = Seen(page)
    policy = dict(seen.attributes)["content"] or ""
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page and policy
    assert not [value for name, value in seen.attributes if name.startswith("on") or name == "src"]
    assert all((value or "").startswith("#") for name, value in seen.attributes if name == "href")
    assert "url(" not in page and "@import" not in page


def test_both_schemes_of_colour_have_every_variable() -> None:
    page = render("t", [Section("s", "w")])
    light, dark = (set(re.findall(r"(--\w+):", part)) for part in page.split("prefers-color-scheme: dark")[:2])
    used = set(re.findall(r"var\((--\w+)\)", page))
    assert used <= light and light == dark


def test_sections_without_content_are_left_out() -> None:
    assert "nothing" not in render("t", [Section("nothing", "", [PageTable(("a",), [])]), Section("some", "words")])


def test_columns_of_numbers_stand_at_the_right() -> None:
    table = PageTable(("name", "MB", "mixed"), [("a", "1.5", "2"), ("b", "", "c")])
    assert table.numeric == [False, True, False]


def test_long_tables_say_what_they_leave_out() -> None:
    page = render("t", [Section("s", "", [PageTable(("n",), [(str(i),) for i in range(2005)])])])
    assert ">1999<" in page and ">2000<" not in page and "5 further rows are not shown" in page


def test_a_figure_is_put_in_as_it_is() -> None:
    assert "<svg><g/></svg>" in render("t", [Section("s", figures=[Figure("<svg><g/></svg>", "c<")])])


def test_what_cannot_be_written_is_found_before_the_work(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    check_page(None)
    check_page(page)
    check_page(tmp_path / "new" / "page.html")
    page.write_text("there")
    with pytest.raises(OutputExistsError, match="exists already"):
        check_page(page)
    check_page(page, overwrite=True)
    with pytest.raises(OutputExistsError, match="which is read"):
        check_page(page, page, overwrite=True)
    for place in (tmp_path, page / "below.html", tmp_path / ("n" * 300), ""):
        with pytest.raises((OutputError, OutputExistsError)):
            check_page(place, overwrite=True)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(OutputError, match="a pipe"):
            check_page(tmp_path / "pipe", overwrite=True)


def test_a_page_is_written_whole_and_names_may_be_no_unicode(tmp_path: Path) -> None:
    file = write_page(tmp_path / "page.html", "half \ud800 pair", [Section("s", "w")])
    assert r"half \ud800 pair" in file.read_text(encoding="utf-8")
    with pytest.raises(OutputExistsError):
        write_page(file, "t", [])
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
