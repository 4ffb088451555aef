"""The site of the documentation: the menu has every page, and the strict build of mkdocs passes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import pictures
from quark import onnx as onnx_flow
from tests import command_reference, rooms_picture, site_search
from tests.source_tree import FILES
from tests.test_architecture import ARROWS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def pages(entries: list[Any]) -> Iterator[str]:
    """The files that a menu names, in its order."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from pages(value if isinstance(value, list) else [value])


def test_the_menu_lists_every_page_once() -> None:
    there = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
    assert sorted(pages(SITE["nav"])) == there


def test_pages_link_to_pages_only() -> None:
    """A link out of docs/ is dead on the site, and so is one to a folder."""
    for page in DOCS.rglob("*.md"):
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#\s]+)", prose):
            if not target.startswith(("https://", "http://")):
                goal = (page.parent / target).resolve()
                shown = goal.suffix in (".svg", ".png") and goal.is_file()
                assert goal.is_relative_to(DOCS) and (shown or goal.suffix == ".md"), f"{page.name} links to {target}"


def test_the_site_asks_no_other_host() -> None:
    assert SITE["theme"]["font"] is False
    assert not {"extra_css", "extra"} & SITE.keys()
    assert all((DOCS / script).is_file() for script in SITE["extra_javascript"])


@pytest.mark.skipif(shutil.which("node") is None, reason="no program here runs the scripts of pages")
def test_an_option_is_looked_for_as_it_is_written() -> None:
    """To the search, a dash before a word means: without it."""
    page = """
        let told; const document = {addEventListener: (_, tell) => { told = tell }}
        eval(require("fs").readFileSync(process.argv[1], "utf8"))
        for (const typed of ["--exclude", "-o", "quantize --for vllm", "compressed-tensors", "--"]) {
            const target = {value: typed, dataset: {mdComponent: "search-query"}}
            told({target}); console.log(target.value)
        }"""
    script = str(DOCS / "javascripts" / "search.js")
    done = subprocess.run(["node", "-e", page, script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["exclude", "o", "quantize for vllm", "compressed-tensors", "--"]


def test_the_reference_has_every_home_of_the_onnx_flow() -> None:
    listed = re.findall(r"^::: ([\w.]+)$", (DOCS / "reference" / "onnx.md").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(onnx_flow.HOMES)


def test_the_reference_of_the_commands_is_what_help_says() -> None:
    """Anew: python -m tests.command_reference > docs/reference/commands.md."""
    assert (DOCS / "reference" / "commands.md").read_text(encoding="utf-8") == command_reference.page()


def test_the_picture_of_the_rooms_is_what_the_arrows_say() -> None:
    """`python -m tests.rooms_picture > docs/rooms.svg` draws it anew; a room that is not described would be missing."""
    assert {"compat", "__version__", "__main__"} | rooms_picture.WHAT.keys() == set(" ".join(ARROWS).split())
    assert (DOCS / "rooms.svg").read_text(encoding="utf-8") == rooms_picture.picture() + "\n"


def test_a_command_draws_each_picture_and_a_page_shows_it() -> None:
    """`python -m benchmarks.pictures NAME` draws one anew."""
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    shown = set(re.findall(r"pictures/(\w+)\.svg", text))
    drawn = {file.stem: file.stat().st_size for file in pictures.PLACE.iterdir()}
    assert shown == pictures.PICTURES.keys() == drawn.keys()
    assert max(drawn.values()) < 25_000


def test_the_questions_quote_messages_that_there_are() -> None:
    quoted = re.findall(r"^### `([^-`][^`]*)`$", (DOCS / "faq.md").read_text(encoding="utf-8"), re.M)
    source = "".join(file.read_text(encoding="utf-8") for file in FILES)
    messages = re.sub(r'"\s*\n\s*f?"', "", source)  # the lines of a message in one
    assert len(quoted) > 20
    assert [message for message in quoted if message not in messages] == []


@pytest.mark.slow
def test_the_strict_build_passes(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="`make docs` brings it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.search(r'(src|<link[^>]*href)="(https?:)?//', page.read_text(encoding="utf-8")), page
    if shutil.which("node") is not None:
        assert site_search.first_pages(tmp_path / "site") == site_search.LOOKED_FOR


def test_the_words_that_people_type_lead_to_pages() -> None:
    assert set(site_search.LOOKED_FOR.values()) <= {page.removesuffix(".md") for page in pages(SITE["nav"])}
    assert len(site_search.LOOKED_FOR) > 20
