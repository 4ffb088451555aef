"""The `quark` program: a typer app built from commands/; no logic."""

from __future__ import annotations

import typer

from quark.command_line import DEBUG_HELP, run
from quark.commands import COMMANDS

app = typer.Typer(
    name="quark",
    help="Quantize a model, and see what it cost.\n\nExample: quark quantize ./llama --scheme uint4_wo_128 -o ./out",
    epilog=DEBUG_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


def main() -> None:
    """Run the command line; bad usage and a QuarkError become one line on stderr and exit code 1."""
    run(app)
