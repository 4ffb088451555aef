"""The one logger of the package ("[QUARK-INFO]: ..."), and streams that never fail.

Lines go to stderr: stdout is for results. A terminal that is gone, a full disk that a redirection writes to or a
narrow encoding ends no run.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import IO, Any, ClassVar, ParamSpec, TypeVar

from quark.errors import visible

T = TypeVar("T")
P = ParamSpec("P")


class UnfailingStream:
    """A text stream whose `write` and `flush` never raise; all else is that of the stream within.

    Characters that its encoding lacks are written as escapes. After an error nothing more is written.

    Attributes:
        stream: The stream within; None, as `sys.stdout` is where it was closed: all is dropped.
        error: What ended it; None as long as it works.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self.stream = stream
        self.error: OSError | ValueError | None = None

    def write(self, text: str) -> int:
        if self.stream is not None and self.error is None:
            try:
                try:
                    self.stream.write(text)
                except UnicodeEncodeError as error:
                    self.stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            except (OSError, ValueError) as error:  # ValueError: the stream is closed
                self.error = error
        return len(text)

    def flush(self) -> None:
        if self.stream is not None and self.error is None:
            try:
                self.stream.flush()
            except (OSError, ValueError) as error:
                self.error = error

    def isatty(self) -> bool:
        """Return True where the stream is a terminal."""
        try:
            return self.stream is not None and self.stream.isatty()
        except ValueError:
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _StderrHandler(logging.Handler):
    """Writes to whatever `sys.stderr` is at the time, so redirection and notebooks see the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = UnfailingStream(sys.stderr)
        stream.write(visible(self.format(record)) + "\n")
        stream.flush()


def _make_logger() -> logging.Logger:
    logger = logging.getLogger("quark")
    if not logger.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("[QUARK-%(levelname)s]: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


logger = _make_logger()


class ScreenLogger:
    """The documented logger of scripts: a child of the one logger, whose lines, stream and level are its own.

    Args:
        name: Whose lines they are, as `__name__`; a handler that the caller adds sees "quark.<name>".

    Attributes:
        logger: The child, a `logging.Logger`.
    """

    def __init__(self, name: str) -> None:
        self.logger = logger.getChild(name)

    @staticmethod
    def set_shared_level(level: int) -> None:
        """Log only from this level of `logging` on (10 debug, 20 info ...): of every ScreenLogger, and of quark."""
        logger.setLevel(level)

    def debug(self, msg: object, *args: Any, **options: Any) -> None:
        self.logger.debug(msg, *args, **options)

    def info(self, msg: object, *args: Any, **options: Any) -> None:
        self.logger.info(msg, *args, **options)

    def warning(self, msg: object, *args: Any, **options: Any) -> None:
        self.logger.warning(msg, *args, **options)

    def error(self, msg: object, *args: Any, **options: Any) -> None:
        self.logger.error(msg, *args, **options)

    def critical(self, msg: object, *args: Any, **options: Any) -> None:
        self.logger.critical(msg, *args, **options)

    def exception(self, msg: object, *args: Any, **options: Any) -> None:
        """Log an error, with the traceback of the exception that is being handled."""
        self.logger.exception(msg, *args, **options)


def log_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: an error that leaves the function is logged, and raised as it was."""

    @functools.wraps(function)
    def logged(*args: P.args, **options: P.kwargs) -> T:
        try:
            return function(*args, **options)
        except Exception as error:
            logger.error("%s", error)
            raise

    return logged


class _Levels:
    """The levels that are asked for at this time, newest last, and the one that holds where none is.

    Threads enter and leave in any order: each takes away what it brought, so that none keeps what another one
    found.
    """

    lock = Lock()
    asked: ClassVar[list[list[int]]] = []
    before = logging.INFO


@contextmanager
def severity(level: int | None) -> Iterator[None]:
    """Within: log only from this level on (0 debug, 1 info, 2 warning, 3 error, 4 critical; None: no change)."""
    if level is None:
        yield
        return
    entry = [10 * (level + 1)]
    with _Levels.lock:
        if not _Levels.asked:
            _Levels.before = logger.level
        _Levels.asked.append(entry)
        logger.setLevel(entry[0])
    try:
        yield
    finally:
        with _Levels.lock:
            _Levels.asked = [other for other in _Levels.asked if other is not entry]
            logger.setLevel(_Levels.asked[-1][0] if _Levels.asked else _Levels.before)
