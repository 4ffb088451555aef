"""`quark schemes`: the named schemes."""

from __future__ import annotations

from quark.command_line import new_table, results
from quark.core.schemes import SCHEMES


def schemes() -> None:
    """List the schemes by name.

    Example: quark schemes
    """
    table = new_table("scheme", "weight", "input activation")
    for name, layer in SCHEMES.items():
        table.add_row(name, str(layer.weight), str(layer.input or "float"))
    results().print(table)
