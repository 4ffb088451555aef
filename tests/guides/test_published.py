"""What published scripts do runs, and runs again into the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.guides.published import PIECES, workplace


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return workplace()


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=[pytest.mark.slow] if index % 8 else []) for index, title in enumerate(PIECES)]
)
def test_a_piece_runs_twice(title: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUARK_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        exec(compile(PIECES[title], title, "exec"), {**names, "__name__": "snippet"})
