"""The command line in this process, judged by what a shell sees: its exit code and what is on stderr."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys

from quark.errors import QuarkError

TERMINAL = {"COLUMNS": "200", "NO_COLOR": "1"}
UNFORESEEN = ("Unexpected ", "Out of memory ")
"""How the line of an error begins that no door refused."""


def quark(*arguments: object) -> None:
    """Run a command as a shell would.

    Raises:
        QuarkError: It refused, as promised: one line on stderr, which is the last, and exit code 1.
        AssertionError: It failed in another way.
        Exception: What it let through.
    """
    from quark.base.command_line import run
    from quark.cli import app

    os.environ.update(TERMINAL)
    code, errors = None, io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            run(app(), arguments=[str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    finally:
        sys.stderr.write(errors.getvalue())
    if code in (None, 0):
        return
    lines = errors.getvalue().strip().splitlines()
    own = [line.removeprefix("quark: ") for line in lines if line.startswith("quark: ")]
    assert code in (1, 2), f"exit code {code}, neither 1 (failed) nor 2 (usage): {own}"
    assert len(own) == 1 and lines[-1] == f"quark: {own[0]}", f"not one line at the end of stderr: {lines[-3:]}"
    asked = "--debug" in arguments  # which shows one
    assert asked or "Traceback" not in errors.getvalue(), f"a traceback beside {own[0]}"
    assert not own[0].startswith(UNFORESEEN), own[0]
    raise QuarkError(own[0])


def shown(*arguments: object) -> str:
    """The command as it is typed."""
    return shlex.join(["quark", *map(str, arguments)])
