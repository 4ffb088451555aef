"""A command line whose errors are one line each, for programs that run as `python -m`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from quark.errors import ConfigError, QuarkError, one_line


class Parser(argparse.ArgumentParser):
    """A command line where an unknown or shortened flag is an error of one line."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **keywords)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError in place of printing the usage."""
        raise ConfigError(f"{message}. `{self.prog} --help` shows what is possible.")


def run(parser: Parser, function: Callable[..., None]) -> None:
    """Call a function with the arguments of the command line; a QuarkError becomes one line and exit code 1."""
    try:
        function(**vars(parser.parse_args()))
    except QuarkError as error:
        sys.stderr.write(f"quark: {one_line(error)}\n")
        sys.exit(1)
