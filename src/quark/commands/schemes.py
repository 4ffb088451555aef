"""`quark schemes`: the named schemes."""

from __future__ import annotations

from rich.table import Table

from quark.command_line import results
from quark.core.schemes import SCHEMES


def schemes() -> None:
    """List the schemes by name.

    Example: quark schemes
    """
    table = Table("scheme", "weight", "input activation")
    for name, layer in SCHEMES.items():
        table.add_row(name, str(layer.weight), str(layer.input or "float"))
    results().print(table)
