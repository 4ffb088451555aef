"""A page: sections of text, tables and figures, written as one HTML file that needs nothing beside it.

What models and data say (names of layers, words of a text) is text of others: the template escapes all of it, and the
page forbids scripts and requests to itself (Content-Security-Policy). Only `figures.py` makes markup.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quark.__version__ import __version__
from quark.base.files import atomic_file, check_apart, check_file
from quark.errors import require_packages, visible

TEMPLATE = "page.html"
_LONGEST_TABLE = 2000
"""PageTable that are shown: a browser takes long for more. A page says what it leaves out."""


@dataclass(frozen=True)
class Figure:
    """A picture and what it shows.

    Attributes:
        svg: Markup, as `figures.py` makes it; never from elsewhere.
        caption: A sentence below it.
        tall: Whether it may be taller than a screen, and scrolls.
    """

    svg: str
    caption: str = ""
    tall: bool = False


@dataclass(frozen=True)
class PageTable:
    """A table.

    Attributes:
        headers: Of its columns.
        rows: Cells, one for each header.
        title: What it is.
        folded: Whether it is shown only when its title is clicked.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    folded: bool = False

    @property
    def numeric(self) -> list[bool]:
        """Of each column, whether its cells are numbers, which stand at the right."""
        columns = [[row[i] for row in self.rows] for i in range(len(self.headers))]
        words = ("inf", "-inf", "nan")
        return [
            any(cells) and all(cell.lstrip("+-x")[:1].isdigit() or cell in words for cell in cells if cell)
            for cells in columns
        ]

    @property
    def shown(self) -> Sequence[Sequence[str]]:
        """The rows that a page holds."""
        return self.rows[:_LONGEST_TABLE]


@dataclass(frozen=True)
class Section:
    """A part of a page; one without content is left out."""

    title: str
    text: str = ""
    tables: Sequence[PageTable] = ()
    figures: Sequence[Figure] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.figures or any(table.rows for table in self.tables))


def check_page(file: str | os.PathLike[str] | None, *read: Any, overwrite: bool = False) -> None:
    """Find what would stop a page, before the work that it tells of.

    Args:
        file: Where it goes; None: there is none.
        read: Files and folders that it may not replace; None is passed over.
        overwrite: Whether it may replace a page.

    Raises:
        MissingDependencyError: jinja2 or matplotlib is absent.
        OutputExistsError, OutputError: The file is there, is a folder or one of `read`, or cannot be written.
    """
    if file is None:
        return
    require_packages("--report", "report", "jinja2", "matplotlib")
    check_apart(file, *read)
    check_file(file, overwrite)


def render(title: str, sections: Sequence[Section]) -> str:
    """The page as HTML. Raises MissingDependencyError."""
    require_packages("A report", "report", "jinja2", "matplotlib")
    import jinja2  # of an extra of its own

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,  # not Markup, which is ours
    )
    shown = [section for section in sections if section]
    return environment.get_template(TEMPLATE).render(title=title, sections=shown, version=__version__)


def write_page(
    file: str | os.PathLike[str], title: str, sections: Sequence[Section], *, overwrite: bool = False
) -> Path:
    """Write a page, whole or not at all.

    Args:
        file: Where.
        title: Its first line.
        sections: In order.
        overwrite: Whether it may replace a file.

    Raises:
        MissingDependencyError, OutputExistsError, OutputError: See `check_page`.
    """
    # A name of a file may hold half of a pair of code units, which UTF-8 has no bytes for.
    content = render(title, sections).encode("utf-8", "replace")
    with atomic_file(file, overwrite) as temporary:
        temporary.write_bytes(content)
    return Path(file)
