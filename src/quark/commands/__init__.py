"""The commands, one file each. A new one is a file here and a line below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quark.commands.algorithms import algorithms
from quark.commands.compare import compare
from quark.commands.convert import convert
from quark.commands.doctor import doctor
from quark.commands.evaluate import evaluate
from quark.commands.formats import formats
from quark.commands.inspect import inspect
from quark.commands.plan import plan
from quark.commands.quantize import quantize
from quark.commands.run import PASS_ON, run
from quark.commands.schemes import schemes

COMMANDS: dict[str, Callable[..., Any]] = {
    "quantize": quantize,
    "run": run,
    "convert": convert,
    "evaluate": evaluate,
    "compare": compare,
    "inspect": inspect,
    "plan": plan,
    "schemes": schemes,
    "algorithms": algorithms,
    "formats": formats,
    "doctor": doctor,
}

SETTINGS: dict[str, dict[str, Any]] = {"run": PASS_ON}
"""Name of a command -> what typer is told of it beside the signature."""

__all__ = ["COMMANDS", "SETTINGS"]
