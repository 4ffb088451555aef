"""Runs typer programs: what is wrong with a command line or a file is one line on stderr and exit code 1."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import typer
from rich.console import Console

from quark.errors import QuarkError, one_line


def program(function: Callable[..., Any], epilog: str | None = None) -> typer.Typer:
    """A program of one command.

    Args:
        function: Its parameters are the arguments and options, annotated as typer wants; its docstring is the help.
        epilog: The last lines of the help.
    """
    # The plain help shows every spelling of an option; the framed one cuts them.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(epilog=epilog)(function)
    return app


def run(app: typer.Typer, name: str = "quark", arguments: Sequence[str] | None = None) -> None:
    """Run a program. Leaves with exit code 1 where it fails.

    Args:
        app: The program.
        name: What its error lines begin with.
        arguments: What follows the program's name; by default what this process was started with.
    """
    try:
        code = app(args=arguments, standalone_mode=False)
    except QuarkError as error:
        _fail(name, str(error))
    except Exception as error:
        # Errors of the command line's own parser: typer exports no base class for them, but all have this method.
        if not hasattr(error, "format_message"):
            raise
        if error.format_message():  # none where the help was printed instead
            _fail(name, error.format_message())
    else:
        if code:
            sys.exit(code)


def _fail(name: str, message: str) -> NoReturn:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"{name}: {one_line(message)}", style="red", markup=False)
    sys.exit(1)
