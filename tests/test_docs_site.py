"""The site of the documentation: the menu has every page, and the strict build of mkdocs passes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quark import onnx as onnx_flow
from tests import command_reference, rooms_picture
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


def test_the_questions_quote_messages_that_there_are() -> None:
    quoted = re.findall(r"^### `([^-`][^`]*)`$", (DOCS / "faq.md").read_text(encoding="utf-8"), re.M)
    source = "".join(file.read_text(encoding="utf-8") for file in FILES)
    messages = re.sub(r'"\s*\n\s*f?"', "", source)  # the lines of a message in one
    assert len(quoted) > 20
    assert [message for message in quoted if message not in messages] == []


LOOKED_FOR = {
    "resume": "howto/long_jobs", "logging": "howto/long_jobs", "environment variables": "howto/long_jobs",
    "lm-eval": "howto/tasks", "llama 70b": "choose/families", "whisper": "choose/families", "moe": "choose/families",
    "out of memory": "guide/large_models", "multi gpu": "guide/large_models", "accuracy drop": "howto/lost_too_much",
    "perplexity": "reference/verdict", "imatrix": "guide/export_gguf", "lora": "guide/loaded",
    "training loop": "guide/loaded", "kv cache": "guide/kv_cache", "mixed precision": "guide/bit_budget",
    "custom observer": "add/observer", "qat": "guide/qat", "bos": "guide/data", "preprocessing": "guide/data",
    "vllm": "howto/vllm", "gguf": "howto/llama_cpp", "hugging face hub": "guide/report", "notebook": "guide/pytorch",
}  # fmt: skip
"""Words that people type -> the page that they look for."""


def _first_found(words: list[str], index: list[dict[str, Any]]) -> str:
    """The page that the search shows first: it weighs tags above titles, and these above the text."""

    def weight(entry: dict[str, Any]) -> tuple[bool, bool, bool]:
        fields = (" ".join(entry.get("tags", [])), entry["title"], entry["text"])
        return tuple(all(word in field.lower() for word in words) for field in fields)  # type: ignore[return-value]

    return str(max(index, key=weight)["location"]).partition(".html")[0]


@pytest.mark.slow
def test_the_strict_build_passes(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="`make docs` brings it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.search(r'(src|<link[^>]*href)="(https?:)?//', page.read_text(encoding="utf-8")), page
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert {words: _first_found(words.split(), index) for words in LOOKED_FOR} == LOOKED_FOR
