"""`quark schemes`: the named schemes."""

from __future__ import annotations

from quark.command_line import new_table, results
from quark.core.schemes import SCHEMES


def schemes() -> None:
    """List the schemes by name; those of GGUF files give embeddings and head a type, too.

    Example: quark schemes
    """
    # The rules are part of the torch flow, which imports torch.
    from quark.torch.config.block_mixes import MIXES

    table = new_table("scheme", "weight", "input activation")
    for name, layer in SCHEMES.items():
        table.add_row(name, str(layer.weight), str(layer.input or "float"))
    for name, mix in MIXES.items():
        table.add_row(name, f"GGUF: {mix.base}, wider where it matters" if mix.wider else f"GGUF: {mix.base}", "float")
    results().print(table)
