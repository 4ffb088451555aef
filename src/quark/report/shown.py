"""Results that show themselves: tables as text where they are printed, pictures and tables as HTML in a notebook."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING

from quark.errors import visible
from quark.report.page import PageTable

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 100
"""Columns of text."""


def text_table(table: PageTable) -> Table:
    """A table for a terminal."""
    from quark.base.command_line import new_table, visible_table  # with rich: when something is printed

    made = new_table(*table.headers, title=table.title or None)
    for row in table.rows:
        made.add_row(*row)
    return visible_table(made)


class Shown(ABC):
    """A result with tables; its fields, which may be whole models, are not what is printed."""

    @abstractmethod
    def tables(self) -> Sequence[PageTable]:
        """The tables, as the command prints them."""

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=WIDTH, markup=False, emoji=False)
        for table in self.tables():
            console.print(text_table(table))
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text.rstrip()

    __repr__ = __str__

    def drawn(self) -> Sequence[str]:
        """Pictures as SVG; a notebook shows them before the tables where matplotlib is installed."""
        return ()

    def _repr_html_(self) -> str:
        """Pictures and tables for a notebook. Names come from models, so all text is escaped."""
        pictures = self.drawn() if find_spec("matplotlib") else ()
        return "".join((*pictures, *map(_html, self.tables())))


def _html(table: PageTable) -> str:
    head = "".join(f"<th>{_escaped(header)}</th>" for header in table.headers)
    rows = "".join(f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    title = f"<caption>{_escaped(table.title)}</caption>"
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _escaped(text: str) -> str:
    return escape(visible(text))
