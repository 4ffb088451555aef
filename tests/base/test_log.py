"""The documented logger of scripts speaks through the one logger, at its level and in its form."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

import quark.common.utils.log as address
import quark.shares.utils.log as older
from quark.base.log import ScreenLogger, log_errors, logger, severity


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    before = logger.level
    yield
    logger.setLevel(before)


def test_both_addresses_show_the_one_class() -> None:
    assert address.ScreenLogger is older.ScreenLogger is ScreenLogger
    assert address.log_errors is older.log_errors is log_errors


def test_a_line_has_the_form_of_all_lines(capsys: pytest.CaptureFixture[str]) -> None:
    screen = ScreenLogger("a.script")
    for write in (screen.debug, screen.info, screen.warning, screen.error, screen.critical):
        write("%d layers", 3)
    screen.info("50 % done")
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.splitlines() == [
        "[QUARK-INFO]: 3 layers",
        "[QUARK-WARNING]: 3 layers",
        "[QUARK-ERROR]: 3 layers",
        "[QUARK-CRITICAL]: 3 layers",
        "[QUARK-INFO]: 50 % done",
    ]


def test_the_level_is_shared(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = ScreenLogger("one"), ScreenLogger("other")
    ScreenLogger.set_shared_level(logging.ERROR)
    one.warning("w")
    other.error("e")
    logger.warning("of quark")
    ScreenLogger.set_shared_level(logging.DEBUG)
    other.debug("d")
    assert capsys.readouterr().err.splitlines() == ["[QUARK-ERROR]: e", "[QUARK-DEBUG]: d"]


def test_an_exception_is_logged_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("of the script")
    except ValueError:
        ScreenLogger(__name__).exception("it failed")
    written = capsys.readouterr().err
    assert written.startswith("[QUARK-ERROR]: it failed\nTraceback") and written.endswith("of the script\n")


def test_log_errors_logs_and_raises(capsys: pytest.CaptureFixture[str]) -> None:
    @log_errors
    def fail(x: int) -> int:
        if x:
            raise KeyError(f"no {x}%")
        return x

    assert fail(0) == 0 and fail.__name__ == "fail"
    with pytest.raises(KeyError, match="no 3%"):
        fail(3)
    assert capsys.readouterr().err == "[QUARK-ERROR]: 'no 3%'\n"


def test_threads_that_mute_the_log_leave_its_level_as_it_was() -> None:
    """One enters while another is within and leaves after it: each of both once found the level of the other."""
    before, first, second = logger.level, severity(2), severity(3)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert logger.level == logging.ERROR
    second.__exit__(None, None, None)
    assert logger.level == before
