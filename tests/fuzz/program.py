"""The command line in this process: `quark ARGUMENTS` as a function that raises what the command raised."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Callable
from typing import Any

from quark.errors import QuarkError, one_line

TERMINAL = {"COLUMNS": "200", "NO_COLOR": "1"}


class Recorded:
    """A program that remembers what it raised: its line on stderr does not say of which class that was."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self.app = app
        self.raised: BaseException | None = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        try:
            return self.app(*args, **options)
        except BaseException as error:
            self.raised = error
            raise


def quark(*arguments: object) -> None:
    """Run a command as a shell would.

    Raises:
        QuarkError: It refused, as promised: one line on stderr, which is the last, and exit code 1.
        AssertionError: It refused in another way.
        Exception: Whatever else it raised.
    """
    from quark.cli import app
    from quark.command_line import run

    os.environ.update(TERMINAL)
    recorded, code, errors = Recorded(app), None, io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            run(recorded, arguments=[str(argument) for argument in arguments])  # type: ignore[arg-type]
    except SystemExit as end:
        code = end.code
    finally:
        sys.stderr.write(errors.getvalue())
    error = recorded.raised
    if error is None or isinstance(error, SystemExit):
        assert code in (None, 0), f"exit code {code} without an error"
        return
    usage = getattr(error, "format_message", None)
    if not isinstance(error, QuarkError) and usage is None:
        raise error
    message = one_line(usage() if usage else error)
    if not message:
        return  # the help was printed
    lines = errors.getvalue().strip().splitlines()
    own = [line for line in lines if line.startswith("quark: ")]
    assert code == 1, f"exit code {code}, not 1: {message}"
    assert len(own) == 1 and own[0] == lines[-1], f"not one line on stderr: {lines[-3:]}"
    assert "Traceback" not in errors.getvalue(), f"a traceback beside {message}"
    raise QuarkError(message)


def shown(*arguments: object) -> str:
    """The command as it is typed."""
    return shlex.join(["quark", *map(str, arguments)])
