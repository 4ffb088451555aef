"""Where the tables of this package are printed."""

from __future__ import annotations

import sys

from rich.console import Console

PIPED = 160
"""Characters of a line in a file: rich takes 80, which breaks every name of a figure over three lines."""


def console(stderr: bool = False) -> Console:
    """A console for tables, as wide as the terminal is."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PIPED)
