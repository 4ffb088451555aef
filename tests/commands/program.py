"""Runs the `quark` program inside the test process: one import of transformers serves every call."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from unittest import mock

from quark.cli import main


@dataclass(frozen=True)
class Done:
    """How a run ended: exit code, what it wrote, and what it logged on the way."""

    code: object
    out: str
    err: str
    log: str


def quark(*args: object) -> Done:
    """Run `quark ARGS`; `err` is without the lines of the log."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        mock.patch.object(sys, "argv", ["quark", *map(str, args)]),
        mock.patch.dict(os.environ, {"COLUMNS": "200"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    lines = err.getvalue().splitlines(keepends=True)
    log = [line for line in lines if line.startswith("[QUARK-")]
    return Done(code, out.getvalue(), "".join(line for line in lines if line not in log), "".join(log))
