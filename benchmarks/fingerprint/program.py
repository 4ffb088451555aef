"""Programs, run in this process: what they print, and their exit code."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from unittest.mock import patch

SECONDS = re.compile(r"\d+(\.\d+)? (ms|s)\b")
FREE = re.compile(r"\d+(\.\d+)? [kMGT]?B free\b")
SPACE = re.compile(r"[ ━─]+")


def run(module: str, *arguments: str) -> str:
    """What `python -m MODULE ARGUMENTS` prints, on stdout and stderr; last its exit code.

    Times that were measured, and what was free of the machine, are left out, and with them the widths of the columns of
    tables: no run repeats them.
    """
    shown = io.StringIO()
    code: object = 0
    arguments_of_program = patch.object(sys, "argv", [module, *arguments])
    with arguments_of_program, contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as left:
            code = left.code
    repeated = FREE.sub("FREE", SECONDS.sub("TIME", shown.getvalue()))
    return f"{SPACE.sub(' ', repeated)}exit code {code or 0}\n"


def quark(*arguments: str) -> str:
    """What the command line prints."""
    return run("quark", *arguments)
