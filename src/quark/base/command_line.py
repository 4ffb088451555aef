"""Runs typer programs: what is wrong with a command line, a file or the program is one line on stderr.

Exit codes: 0 done; 1 refused, failed, or done but the results could not be printed; 2 the command line is wrong; 130
interrupted by Ctrl-C.

Four words may stand anywhere on the line: --debug, --json, --quiet, --verbose.

Of the processes that torchrun starts the first one prints, and the first of each machine says what went wrong.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any, ClassVar, cast

import typer
from rich.console import Console
from rich.table import Column, Table

from quark.base.log import UnfailingStream, severity
from quark.base.memory_and_disk import asked_bytes, is_out_of_memory
from quark.base.progress import bars
from quark.errors import (
    INTERRUPTED,
    USAGE,
    QuarkError,
    SignalledError,
    UsageError,
    interrupt_code,
    is_panic,
    one_line,
    visible,
)

DEBUG, DEBUG_VARIABLE = "--debug", "QUARK_DEBUG"
JSON, QUIET, VERBOSE = "--json", "--quiet", "--verbose"
ANYWHERE = (DEBUG, JSON, QUIET, VERBOSE)
_QUIET_LIBRARIES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""Variables that other libraries read while they are imported; one that is set stays. --verbose shows their lines."""
DEBUG_HELP = (
    f"Anywhere on the line: {DEBUG} (or {DEBUG_VARIABLE}=1) shows the traceback of an error; {JSON} prints what is "
    f"printed as one JSON object; {QUIET} logs warnings only; {VERBOSE} logs more."
)
PACKAGE = Path(__file__).parents[1]
PATIENCE = 10.0
"""Seconds for which a silent process waits before it ends, because torchrun then ends the one that speaks."""


def started_processes() -> int:
    """How many processes torchrun started; 1 without it."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() and "RANK" in os.environ else 1


def _is_first(variable: str) -> bool:
    """Return True where this process is the first of all (RANK), or of its machine (LOCAL_RANK)."""
    return started_processes() == 1 or os.environ.get(variable, "0") == "0"


def program(function: Callable[..., Any], epilog: str | None = None) -> typer.Typer:
    """A program of one command.

    Args:
        function: Its parameters are the arguments and options, annotated as typer wants; its docstring is the help.
        epilog: The last lines of the help.
    """
    # The plain help shows every spelling of an option; the framed one cuts them.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(epilog="\n\n".join(filter(None, [epilog, DEBUG_HELP])))(function)
    return app


class Results:
    """Where results are printed: stdout, in characters that it has. Names in brackets are no markup there.

    With --json nothing is printed until the program ends: then one object with `tables`, each a title and rows by
    header, and `lines`, all other text.
    """

    collected: ClassVar[dict[str, list[Any]] | None] = None
    """The rows that --json prints at the end, by their kind; None without it."""

    def print(self, item: Any = "", **options: Any) -> None:
        """Print a table, or text; `options` are those of `rich.console.Console.print`.

        Control characters in it are shown as escapes.
        """
        if Results.collected is None:
            item = visible_table(item) if isinstance(item, Table) else visible(item) if isinstance(item, str) else item
            Console(file=sys.stdout, markup=False, emoji=False).print(item, **options)
        elif isinstance(item, Table):
            headers = [str(column.header) for column in item.columns]
            rows = [
                dict(zip(headers, map(_value, row), strict=True))  # numbers as numbers, empty cells as null
                for row in zip(*(column._cells for column in item.columns), strict=True)
            ]
            Results.collected["tables"].append({"title": str(item.title or ""), "rows": rows})
        else:
            Results.collected["lines"].append(str(item))

    def draw(self, text: str) -> None:
        """Print a drawing of what a table has; not with --json, which has the table, and nothing for an empty text."""
        if text and Results.collected is None:
            self.print(text, highlight=False, soft_wrap=True)


def _value(cell: Any) -> Any:
    text = str(cell)
    try:
        value = json.loads(text)
    except ValueError:
        return text or None
    # A name may look like a number with an exponent, or be the word "null".
    return value if type(value) in (int, float) and abs(value) < float("inf") else text


_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)
"""The errors of a system for a path that is none, whoever looks for it; only the user can have given it."""


def results() -> Results:
    """Where results are printed."""
    return Results()


def visible_table(table: Table) -> Table:
    """A table whose texts have escapes in the place of control characters; changed in place."""
    table.title = visible(table.title) if isinstance(table.title, str) else table.title
    for column in table.columns:
        column._cells = [visible(cell) if isinstance(cell, str) else cell for cell in column._cells]
        column.header = visible(column.header) if isinstance(column.header, str) else column.header
    return table


def new_table(*headers: str, title: str | None = None) -> Table:
    """A table whose cells go on in the next line where they are too long: names differ at their ends."""
    return Table(*(Column(header, overflow="fold") for header in headers), title=title)


def run(app: typer.Typer, name: str = "quark", arguments: Sequence[str] | None = None) -> None:
    """Run a program. Leaves with an exit code other than 0 where it fails.

    Args:
        app: The program.
        name: What its error lines begin with, and its help shows.
        arguments: What follows the program's name; by default what this process was started with.
    """
    _open_descriptors()
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in words or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")
    output = UnfailingStream(sys.stdout if _is_first("RANK") else None)
    with _said_as_asked(words), redirect_stdout(cast(IO[str], output)):
        code = _run(app, name, [word for word in words if word not in ANYWHERE], debug)
        if Results.collected is not None and any(Results.collected.values()):
            output.write(visible(json.dumps(Results.collected, indent=2, ensure_ascii=False)) + "\n")
        output.flush()
    if output.error is not None:
        _silence(output)
        # A reader that has seen enough is no failure.
        if not code and not isinstance(output.error, BrokenPipeError):
            code = _say(name, f"All is done, but the results could not be printed: {_reason(output.error)}.")
    if code:
        sys.exit(code)


@contextmanager
def _said_as_asked(words: Sequence[str]) -> Iterator[None]:
    """Within: logs have the level, and results the form, that the words of a command line ask for."""
    quiet = (
        {} if VERBOSE in words else {name: value for name, value in _QUIET_LIBRARIES.items() if name not in os.environ}
    )
    os.environ.update(quiet)
    level = 3 if not _is_first("RANK") else 2 if QUIET in words else 0 if VERBOSE in words else None
    Results.collected = {"tables": [], "lines": []} if JSON in words else None
    try:
        with severity(level):
            yield
    finally:
        Results.collected = None
        for variable in quiet:
            os.environ.pop(variable, None)


def _run(app: typer.Typer, name: str, words: list[str], debug: bool) -> int:
    """Run a program; return its exit code."""
    try:
        # Not app(...): that takes a broken pipe of a worker for one of the terminal, and says nothing.
        command = typer.main.get_command(app)
        with _signals(), command.make_context(name, words) as context, bars() if _is_first("RANK") else nullcontext():
            command.invoke(context)
    except typer.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort) as error:
        _trace(debug)
        return _say(name, "Interrupted.", interrupt_code(error) or INTERRUPTED)
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        if (code := interrupt_code(error)) is not None:
            _trace(debug)
            return _say(name, "Interrupted.", code)
        if isinstance(error, QuarkError):
            _trace(debug)
            return _say(name, str(error), USAGE if isinstance(error, UsageError) else 1)
        # Errors of the command line's own parser: typer exports no base class for them, but all have this method.
        if hasattr(error, "format_message"):
            message = error.format_message()  # none where the help was printed instead
            return _say(name, message, USAGE) if message else 0
        _trace(debug)
        return _say(name, _unexpected(error, debug))
    return 0


@contextmanager
def _signals() -> Iterator[None]:
    """Within: SIGTERM and SIGHUP end the program as Ctrl-C does, with all that this removes, keeps and says.

    Not where somebody said otherwise (nohup), and not in one of several processes, which wait in libraries for others.
    """
    mine = threading.current_thread() is threading.main_thread() and "RANK" not in os.environ
    known = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if mine and hasattr(signal, name)]
    taken = [number for number in known if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, frame: object) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_IGN)  # a second one would end what the first one lets be removed
        raise SignalledError(number)

    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


FREES_A_DEVICE = (
    "Possible: --stream, where one block visits the device; shorter samples (--length); other programs off it; "
    "--device cpu."
)


def _unexpected(error: BaseException, debug: bool) -> str:
    """Return the message for an error that nobody foresaw: its kind, where it came up, and what to do."""
    # This file is always among them.
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(PACKAGE)]
    place = f"in {Path(own[-1].filename).relative_to(PACKAGE.parent)}, line {own[-1].lineno}"
    if isinstance(error, ModuleNotFoundError) and (package := _absent(error)) is not None:
        return f"This needs the package {package}, which is not installed: pip install {_bringing(package)}."
    if isinstance(error, MemoryError):
        return f"Out of memory {place}{f': {error}' if str(error) else ''}."
    if is_out_of_memory(error):
        asked = asked_bytes(error)
        return f"The device is full, {place}{f', where {asked} were asked for' if asked else ''}. {FREES_A_DEVICE}"
    if isinstance(error, OSError) and error.errno in _NO_PATH and error.filename is not None:
        return f"{str(error.filename)[:60]} ... is no path of this system: {error.strerror}."
    message = f"Unexpected {type(error).__name__} {place}: {error}".rstrip(".")
    return f"{message}. {'Please' if debug else f'Run again with {DEBUG} for the traceback, and please'} report it."


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _absent(error: ModuleNotFoundError) -> str | None:
    """The package that is not installed; None where a module of a package that is there was not found."""
    package = (error.name or "").partition(".")[0]
    return package if package and package != PACKAGE.name and package not in sys.modules else None


def _bringing(package: str) -> str:
    """Return the name that pip installs for a package: the extra of this distribution that brings it, or its own."""
    for line in metadata.requires("openquark") or ():
        found = re.fullmatch(r"([\w-]+).*extra == ['\"](\w+)['\"]", line)
        if found and found[1].replace("-", "_") == package and found[2] not in ("all", "dev"):
            return f"'openquark[{found[2]}]'"
    return package


def _trace(debug: bool) -> None:
    if debug:
        UnfailingStream(sys.stderr).write(traceback.format_exc())


def _say(name: str, message: str, code: int = 1) -> int:
    """Write an error line; return the exit code."""
    if not _is_first("LOCAL_RANK"):
        time.sleep(PATIENCE)
        return code
    errors = UnfailingStream(sys.stderr)
    console = Console(file=cast(IO[str], errors), soft_wrap=True, highlight=False, markup=False, emoji=False)
    console.print(f"{name}: {one_line(message)}", style="red")
    errors.flush()
    if errors.error is not None:
        _silence(errors)
    return code


def _open_descriptors() -> None:
    """Let nothing be opened in the place of a closed stdout or stderr, where libraries of C write what they log."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _silence(broken: UnfailingStream) -> None:
    """Let what a broken stream still holds go nowhere, which Python would fail to write when it ends."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, broken.fileno())
        os.close(nowhere)
