"""Bars in a notebook: one HTML element that is replaced, which needs no package but IPython, that a notebook has."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from typing import Any

from quark.base.progress import seconds_and_peak
from quark.errors import visible

_SHOWN_SECONDS = 0.2
"""How long the same bars are shown at least: each change is a message to the page."""


def in_notebook() -> bool:
    """Return True where this program is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "IPKernelApp" in getattr(shell, "config", ())


@dataclass
class _Task:
    """A loop: what is counted, how many of how many are done, and the end of its line."""

    description: str
    total: int | None
    completed: int
    line: str

    def html(self) -> str:
        """A row of the table of bars."""
        of = "" if self.total is None else f" max='{self.total}' value='{self.completed}'"
        count = f"{self.completed}/{'?' if self.total is None else self.total}"
        cells = (escape(visible(self.description)), f"<progress{of}></progress>", count, escape(visible(self.line)))
        return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


class NotebookBars:
    """Has what is used of `rich.progress.Progress`."""

    def __init__(self) -> None:
        self._tasks: dict[int, _Task] = {}
        self._handle: Any = None
        self._shown = 0.0

    def start(self) -> None:
        """Show the bars, of which there are none yet."""
        from IPython.display import HTML, display

        self._handle = display(HTML(""), display_id=True)

    def add_task(self, description: str, total: int | None, completed: int, line: str) -> int:
        """Show a bar, and return its number."""
        number = max(self._tasks, default=0) + 1
        self._tasks[number] = _Task(description, total, completed, line)
        self._show()
        return number

    def update(self, task: int, completed: int, line: str) -> None:
        """Change a bar; it is shown when the last change was long enough ago."""
        self._tasks[task].completed, self._tasks[task].line = completed, line
        if seconds_and_peak.seconds_now() - self._shown >= _SHOWN_SECONDS:
            self._show()

    def remove_task(self, task: int) -> None:
        """Take a bar away."""
        del self._tasks[task]
        self._show()

    def stop(self) -> None:
        """Take all away."""
        self._tasks.clear()
        self._show()

    def _show(self) -> None:
        from IPython.display import HTML

        self._shown = seconds_and_peak.seconds_now()
        rows = "".join(task.html() for task in self._tasks.values())
        if self._handle is not None:
            self._handle.update(HTML(f"<table>{rows}</table>" if rows else ""))
