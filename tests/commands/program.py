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
    """How a run ended: exit code, and what it wrote."""

    code: object
    out: str
    err: str


def quark(*args: object) -> Done:
    """Run `quark ARGS`. An exception that the program does not turn into an exit code comes out as it is."""
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
    return Done(code, out.getvalue(), err.getvalue())
