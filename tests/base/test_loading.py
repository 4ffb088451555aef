"""Python's garbage collection is off where libraries load, and as it was behind that."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quark import cli
from quark.base.loading import without_collection


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    yield
    gc.enable()


def test_collection_is_off_inside() -> None:
    with pytest.raises(ImportError), without_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    with without_collection():
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_program_leaves_no_garbage_to_be_looked_for_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[..., Any]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr("sys.argv", ["quark", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    assert gc.freeze in at_exit
