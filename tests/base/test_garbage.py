"""Python's garbage collection is off where libraries load, and as it was behind that."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quark import cli
from quark.base.garbage import without_collection


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


@pytest.mark.parametrize("triton", [False, True])
def test_the_program_leaves_no_garbage_to_be_looked_for_at_its_end(
    triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Except beside a module that would take what is left for leaks, and print so.
    monkeypatch.setitem(sys.modules, "triton._C.libtriton", None)
    if not triton:
        del sys.modules["triton._C.libtriton"]
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    at_exit: list[Callable[..., Any]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr("sys.argv", ["quark", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    for function in at_exit:
        function()
    assert len(frozen) == (not triton)
