"""Tool: a conversion of a file, its flags, and the command line that all tools share.

Every tool takes the paths of the input and the output in their place or after a flag, in each documented spelling.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import onnx_ir as ir

from quark.errors import ConfigError, QuarkError, did_you_mean, one_line
from quark.onnx.graph.model_file import read, save

PATHS = {
    "input": ("--input", "--input_model", "--input_model_path"),
    "output": ("--output", "--output_model", "--output_model_path", "--quantized_model_path"),
}
"""Name of a path -> the spellings of its flag."""


@dataclass(frozen=True)
class Flag:
    """A flag besides the paths.

    Attributes:
        help: What it says.
        kind: Turns its text into a value; bool: a switch without a value.
        default: Its value where it is left out; None: it must be given.
        choices: The possible values; empty: any.
    """

    help: str
    kind: Callable[[str], Any] = str
    default: Any = None
    choices: Sequence[str] = ()


@dataclass(frozen=True)
class Tool:
    """A conversion.

    Attributes:
        run: (model, **flags) -> how many places changed.
        summary: What it does, in one line.
        flags: Its flags.
        order: What stands where on the command line, without flags.
        read: Path -> model.
        write: (model, path, whether weights go beside it) -> None.
    """

    run: Callable[..., int]
    summary: str
    flags: Mapping[str, Flag] = field(default_factory=dict)
    order: tuple[str, ...] = ("input", "output")
    read: Callable[[Path], ir.Model] = read
    write: Callable[[ir.Model, Path, bool], None] = save

    def convert(self, source: Path, target: Path, external_data: bool = False, **flags: Any) -> int:
        """Read, convert, write; return how many places changed."""
        model = self.read(source)
        count = self.run(model, **flags)
        self.write(model, target, external_data)
        return count


def run_tool(name: str, arguments: Sequence[str] | None = None) -> None:
    """Run a tool of the table. A wrong command line and a QuarkError become one line on stderr and exit code 1."""
    from quark.onnx.converters import TOOLS

    try:
        tool = TOOLS[name]
        values = parse(name, tool, sys.argv[1:] if arguments is None else arguments)
        source, target = Path(values.pop("input")), Path(values.pop("output"))
        count = tool.convert(source, target, **values)
        sys.stdout.write(f"{name}: {count} {'place' if count == 1 else 'places'} changed, written to {target}\n")
    except QuarkError as error:
        sys.stderr.write(f"{name}: {one_line(error)}\n")
        sys.exit(1)


def parse(name: str, tool: Tool, arguments: Sequence[str]) -> dict[str, Any]:
    """The values of paths and flags. Raises ConfigError for anything unknown, missing or wrong."""
    parser = _Parser(prog=f"python -m quark.onnx.tools.{name}", description=tool.summary, allow_abbrev=False)
    parser.add_argument("positional", nargs="*", metavar=" ".join(tool.order), help="in this order, or as flags")
    for path, spellings in PATHS.items():
        parser.add_argument(*spellings, dest=path, help=f"path of the {path} model")
    beside = ("--save_as_external_data", "--external_data")
    parser.add_argument(*beside, dest="external_data", action="store_true", help="write weights beside the model")
    for flag, row in tool.flags.items():
        if row.kind is bool:
            parser.add_argument(f"--{flag}", action="store_true", help=row.help)
        else:
            parser.add_argument(
                f"--{flag}", type=row.kind, default=row.default, choices=row.choices or None, help=row.help
            )
    found, rest = parser.parse_known_args(list(arguments))
    values = vars(found)
    unknown = [text for text in rest if text.startswith("-")]
    if unknown:
        known = [spelling for action in parser._actions for spelling in action.option_strings]
        raise ConfigError(f"Unknown flag {unknown[0]}. {did_you_mean(unknown[0].split('=')[0], known)}")
    return _placed(tool, values, [*values.pop("positional"), *rest])


def _placed(tool: Tool, values: dict[str, Any], positional: list[str]) -> dict[str, Any]:
    """The values, with those that stand in their place put where no flag gave one."""
    free = [key for key in tool.order if values.get(key) is None]
    if len(positional) > len(free):
        raise ConfigError(f"Unexpected argument {positional[len(free)]!r}; there are: {', '.join(tool.order)}.")
    for key, text in zip(free, positional, strict=False):
        kind = tool.flags[key].kind if key in tool.flags else str
        try:
            values[key] = kind(text)
        except ValueError:
            raise ConfigError(f"{key} must be {getattr(kind, '__name__', 'text')}, got {text!r}.") from None
    missing = [key for key in (*tool.order, *tool.flags) if values.get(key) is None]
    if missing:
        raise ConfigError(f"Missing: {', '.join(missing)}. `--help` lists the arguments.")
    return values


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
