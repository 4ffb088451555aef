"""The reference page of the commands, from what `--help` says: python -m tests.command_reference > PAGE."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import typer

from quark.cli import app


def page() -> str:
    """docs/reference/commands.md."""
    return "\n".join(lines()) + "\n"


def lines() -> Iterator[str]:
    """The page: for each command what it does, its examples and a table of options for each panel of the help."""
    yield "# The commands"
    yield ""
    yield "This page lists the commands and their options, as `quark COMMAND --help` shows them. Results are printed to"
    yield "stdout and the log to stderr; `--debug` adds the traceback to an error. The exit codes are in [What quark"
    yield "promises](../guide/promises.md#exit-codes-and-streams)."
    group: Any = typer.main.get_command(app())
    for name, command in group.commands.items():
        paragraphs = [" ".join(text.split()) for text in command.help.split("\n\n")]
        examples = [text.removeprefix("Example: ") for text in paragraphs if text.startswith("Example: ")]
        yield from ("", f"## quark {name}", "")
        yield from [text for text in paragraphs if not text.startswith("Example: ")]
        yield from ("", "```text", *examples, "```")
        panels: dict[str, list[Any]] = {}
        for parameter in command.params:
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or "For all", []).append(parameter)
        for panel, parameters in panels.items():
            yield from ("", f"| {panel} | What it means |", "| --- | --- |")
            yield from (row(parameter) for parameter in parameters)


def row(parameter: Any) -> str:
    """One option, or argument, of a command."""
    spellings = [*parameter.opts, *parameter.secondary_opts]
    shown = ", ".join(f"`{word if word.startswith('-') else word.upper()}`" for word in spellings)
    meaning = " ".join((parameter.help or "").split()).replace("|", r"\|").replace("*", r"\*")
    return f"| {shown} | {meaning} |"


if __name__ == "__main__":
    sys.stdout.write(page())
