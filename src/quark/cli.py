"""The `quark` program: a typer app built from tools/; no logic."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from quark.commands import COMMANDS
from quark.errors import QuarkError, one_line

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
    """Run the command line; bad usage and a QuarkError become one line on stderr and exit code 1."""
    try:
        sys.exit(app(standalone_mode=False))
    except QuarkError as error:
        _fail(str(error))
    except Exception as error:
        # Errors of the command line's own parser: typer exports no base class for them, but all have this method.
        if not hasattr(error, "format_message"):
            raise
        if error.format_message():
            _fail(error.format_message())


def _fail(message: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"quark: {one_line(message)}", style="red", markup=False)
    sys.exit(1)
