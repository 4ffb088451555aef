"""The site of the documentation: the menu has every page, and the strict build of mkdocs passes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

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
                assert goal.is_relative_to(DOCS) and goal.suffix == ".md", f"{page.name} links to {target}"


def test_the_site_asks_no_other_host() -> None:
    assert SITE["theme"]["font"] is False and "offline" in SITE["plugins"]
    assert not {"extra_javascript", "extra_css", "extra"} & SITE.keys()


@pytest.mark.slow
def test_the_strict_build_passes(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="`make docs` brings it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "search" / "search_index.json").stat().st_size > 10_000
