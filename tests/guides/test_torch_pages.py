"""What the pages on PyTorch print, restated with small models, and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.guides.torch_pages import basics, graphs, language_models, tutorials, workplace

pytestmark = pytest.mark.slow

PAGES = {
    "basics": basics.SNIPPETS,
    "language models": language_models.SNIPPETS,
    "graphs": graphs.SNIPPETS,
    "tutorials": tutorials.SNIPPETS,
}


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return workplace()


@pytest.mark.parametrize(("page", "title"), [(page, title) for page, snippets in PAGES.items() for title in snippets])
def test_a_snippet_runs(page: str, title: str, names: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    exec(PAGES[page][title], {**names, "__name__": "snippet"})
