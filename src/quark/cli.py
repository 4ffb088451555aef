"""The `quark` program: a typer app built from commands/; no logic."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # that of typing, which takes long to read: Ctrl-C is met from here on
if TYPE_CHECKING:
    import typer


def main() -> None:
    """Run the command line; bad usage and a QuarkError become one line on stderr and exit code 1."""
    try:
        from quark.command_line import run

        run(app())
    except BaseException as error:
        from quark.errors import INTERRUPTED, is_interrupt

        if not is_interrupt(error):
            raise
        sys.stderr.write("quark: Interrupted.\n")
        sys.exit(INTERRUPTED)


def app() -> typer.Typer:
    """The program."""
    import typer

    from quark.command_line import DEBUG_HELP
    from quark.commands import COMMANDS

    made = typer.Typer(
        name="quark",
        help="Quantize a model, and see what it cost.\n\nExample: quark quantize ./llama --scheme uint4_wo_128 -o out",
        epilog=DEBUG_HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name, command in COMMANDS.items():
        made.command(name)(command)
    return made
