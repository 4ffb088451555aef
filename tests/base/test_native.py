"""The cache of compiled libraries: no code is loaded that another user may have put there."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from quark.base import native
from quark.errors import OutputError, QuarkError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="owners and modes of POSIX")


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A library that is built by copying: what is tested is where."""
    monkeypatch.setenv("QUARK_CACHE", str(tmp_path / "cache" / "quark"))
    monkeypatch.setattr(native, "_command", lambda purpose, without: ["compiler"])
    monkeypatch.setattr(native, "_build", lambda command, source, path, without: path.write_bytes(source.read_bytes()))
    (tmp_path / "one.cpp").write_text("code")
    return tmp_path / "one.cpp"


def test_the_cache_is_private(source: Path) -> None:
    before = os.umask(0o022)
    try:
        path = native.library(source, "one", "")
    finally:
        os.umask(before)
    assert path.read_text() == "code" and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_may_write_is_refused(mode: int, source: Path) -> None:
    path = native.library(source, "one", "")
    path.parent.chmod(mode)
    with pytest.raises(QuarkError, match="others may write into it: no library in it is loaded.*QUARK_CACHE.* numpy"):
        native.library(source, "one", "There is numpy.")


def test_a_folder_of_another_user_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = native.library(source, "one", "")
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    if owner:
        with pytest.raises(QuarkError, match="belongs to another user"):
            native.library(source, "one", "")
    else:  # what root made is trusted; root's tests may give it away
        assert native.library(source, "one", "") == path
        os.chown(path.parent, 12345, -1)
        with pytest.raises(QuarkError, match="belongs to another user"):
            native.library(source, "one", "")


def test_a_library_that_others_may_write_is_built_again(source: Path) -> None:
    path = native.library(source, "one", "")
    path.write_text("planted")
    assert native.library(source, "one", "").read_text() == "planted"
    path.chmod(0o646)
    assert native.library(source, "one", "").read_text() == "code"


def test_a_cache_that_cannot_be_made_is_said(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(OutputError, match="cache folder .* cannot be made: Not a directory"):
        native.library(source, "one", "")


def test_without_a_compiler_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("QUARK_CACHE", str(tmp_path))
    native._say_once.cache_clear()
    try:
        with caplog.at_level("INFO", logger="quark"):
            for name in ("one", "two"):
                assert native.loaded(Path(native.__file__), name, "numpy does it.") is None
    finally:
        native._say_once.cache_clear()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["The compiled parts of quark cannot be built here, so some steps take longer; --verbose says why."]
