"""The one logger of the package ("[QUARK-INFO]: ...") and its progress bars."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class _StdoutHandler(logging.Handler):
    """Writes to whatever `sys.stdout` is at the time, so redirection and notebooks see the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stdout.write(self.format(record) + "\n")
        sys.stdout.flush()


def _make_logger() -> logging.Logger:
    logger = logging.getLogger("quark")
    if not logger.handlers:
        handler = _StdoutHandler()
        handler.setFormatter(logging.Formatter("[QUARK-%(levelname)s]: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


logger = _make_logger()


@contextmanager
def severity(level: int | None) -> Iterator[None]:
    """Within: log only from this level on (0 debug, 1 info, 2 warning, 3 error, 4 critical; None: no change)."""
    before = logger.level
    if level is not None:
        logger.setLevel(10 * (level + 1))
    try:
        yield
    finally:
        logger.setLevel(before)


def progress(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate over `items` with a progress bar on stderr; silent where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    # rich costs 50 ms: it is imported when a bar is really drawn, not with the package.
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description=description, total=total, console=Console(stderr=True), transient=True)
