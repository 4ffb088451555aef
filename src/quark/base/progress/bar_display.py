"""Bars of a program on a terminal, or of a notebook; those of all loops that run in one display."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quark.base.log import UnfailingStream, logger
from quark.base.progress.notebook_bars import NotebookBars, in_notebook


class _Bars:
    """The bars of a program, all in one display.

    Attributes:
        stream: Where they are drawn; None: lines are logged.
        display: The `rich.progress.Progress`, or the `NotebookBars`, while a loop runs.
        count: Loops that have a bar.
    """

    stream: UnfailingStream | None = None
    display: Any = None
    count = 0


def drawing() -> bool:
    """Return True where loops are bars now."""
    return _Bars.stream is not None or (logger.level <= logging.INFO and in_notebook())


@contextmanager
def bars() -> Iterator[None]:
    """Within: loops are bars in place of lines, where stderr is a terminal. For programs, not for their libraries."""
    stream = UnfailingStream(sys.stderr)
    before, _Bars.stream = _Bars.stream, stream if stream.isatty() and logger.level <= logging.INFO else None
    try:
        yield
    finally:
        _Bars.stream = before
        _stop_display()


class Bar:
    """The bar of a loop of so many steps, of which some are done."""

    def __init__(self, loop: str, total: int | None, done: int) -> None:
        _Bars.count += 1
        if _Bars.display is None:
            _Bars.display = NotebookBars() if _Bars.stream is None else _new_display(_Bars.stream)
            _Bars.display.start()
        self.display = _Bars.display
        self.task = self.display.add_task(loop, total=total, completed=done, line="")

    def show(self, done: int, line: str) -> None:
        """Show how far the loop is, and what it says."""
        self.display.update(self.task, completed=done, line=line)

    def close(self) -> None:
        """Remove it, and with the last one the display."""
        _Bars.count -= 1
        if self.display is _Bars.display:
            self.display.remove_task(self.task)
            if not _Bars.count:
                _stop_display()


def _new_display(stream: Any) -> Any:
    # rich costs 50 ms: it is imported when a bar is really drawn, not with the package.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    # Of what a narrow terminal has no room for, the end of the line is left out, never the loop and its count.
    rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[line]}", markup=False, table_column=rest),
        console=Console(file=stream),
        transient=True,
        expand=True,
        redirect_stdout=False,
    )


def _stop_display() -> None:
    display, _Bars.display, _Bars.count = _Bars.display, None, 0
    if display is not None:
        display.stop()
