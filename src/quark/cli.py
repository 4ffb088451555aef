"""The `quark` program: a typer app built from tools/; no logic."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from quark.errors import QuarkError
from quark.tools import COMMANDS

app = typer.Typer(
    name="quark",
    help="Quantize a model, and see what it cost.\n\nExample: quark quantize ./llama --scheme uint4_wo_128 -o ./out",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


def main() -> None:
    """Run the command line; a QuarkError becomes one line on stderr and exit code 1."""
    try:
        app()
    except QuarkError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"quark: {error}", style="red", markup=False)
        sys.exit(1)
