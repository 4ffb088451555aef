"""`python -m quark.onnx.tools.<name>`: the command line of every tool, made from its row of `TOOLS`.

The paths stand in their place or after a flag, in each documented spelling.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Mapping, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from quark.base.command_line import program, run
from quark.base.files import check_file
from quark.compat.onnx_tools import TOOLS
from quark.compat.onnx_tools.tool import Flag, Tool
from quark.errors import ConfigError

INPUT = typer.Option("--input", "--input_model", "--input_model_path", help="path of the input model")
OUTPUT = typer.Option(
    "--output", "--output_model", "--output_model_path", "--quantized_model_path", help="path of the output model"
)
BESIDE = typer.Option("--save_as_external_data", "--external_data", help="write weights beside the model")


def run_tool(name: str, arguments: Sequence[str] | None = None) -> None:
    """Run a tool. A wrong command line and a QuarkError become one line on stderr and exit code 1.

    Args:
        name: A name in `TOOLS`.
        arguments: What follows the name; by default what this process was started with.
    """
    tool = TOOLS[name]
    switches = {"--save_as_external_data", "--external_data"}
    switches |= {f"--{key}" for key, flag in tool.flags.items() if flag.kind is bool}
    words = list(sys.argv[1:] if arguments is None else arguments)
    run(program(command(name, tool)), name, _without_truth(words, switches))


def _without_truth(words: Sequence[str], switches: Container[str]) -> list[str]:
    """Switches are documented in two spellings, `--flag` and `--flag True`; the second becomes the first."""
    kept: list[str] = []
    for word in words:
        if kept and kept[-1] in switches and word.lower() in ("true", "false"):
            if word.lower() == "false":
                kept.pop()
        else:
            kept.append(word)
    return kept


def command(name: str, tool: Tool) -> Callable[..., None]:
    """The tool as a function whose signature typer makes a command line of."""

    def convert(positional: list[str] | None, **values: Any) -> None:
        values = _placed(tool, values, positional or [])
        source = values.pop("input")
        if tool.tell is not None:
            sys.stdout.writelines(f"{line}\n" for line in tool.tell(tool.read(Path(source))))
            return
        target = values.pop("output")
        check_file(target, overwrite=True)  # a Path has lost a slash at the end
        count = tool.convert(Path(source), Path(target), **values)
        sys.stdout.write(f"{name}: {count} {'place' if count == 1 else 'places'} changed, written to {target}\n")

    in_order = typer.Argument(metavar=" ".join(tool.order), help="in this order, or as flags", show_default=False)
    outputs = [
        _parameter("output", Annotated[str | None, OUTPUT], None),
        _parameter("external_data", Annotated[bool, BESIDE], False),
    ]
    if tool.tell is not None:
        outputs = []
    parameters = [
        _parameter("positional", Annotated[list[str] | None, in_order], None),
        _parameter("input", Annotated[str | None, INPUT], None),
        *outputs,
        *(_flag_parameter(key, flag, key in tool.order) for key, flag in tool.flags.items()),
    ]
    convert.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    convert.__doc__ = tool.summary
    return convert


def _parameter(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _flag_parameter(name: str, flag: Flag, positional: bool) -> Parameter:
    option = typer.Option(f"--{name}", help=flag.help)
    if flag.kind is bool:
        return _parameter(name, Annotated[bool, option], False)
    if positional:  # may stand in its place instead
        return _parameter(name, Annotated[flag.kind | None, option], None)
    return _parameter(name, Annotated[flag.kind, option], Parameter.empty if flag.default is None else flag.default)


def _placed(tool: Tool, flags: Mapping[str, Any], positional: Sequence[str]) -> dict[str, Any]:
    """The values of the flags, with the words that stand in their place put where no flag gave a value.

    Raises:
        ConfigError: There are too many words or too few, or one is not of its type.
    """
    values = dict(flags)
    free = [key for key in tool.order if values[key] is None]
    if len(positional) > len(free):
        raise ConfigError(f"Unexpected argument {positional[len(free)]!r}; there are: {', '.join(tool.order)}.")
    for key, text in zip(free, positional, strict=False):
        kind = tool.flags[key].kind if key in tool.flags else str
        try:
            values[key] = kind(text)
        except ValueError:
            raise ConfigError(f"{key} must be {kind.__name__}, got {text!r}.") from None
    missing = [key for key in tool.order if values[key] is None]
    if missing:
        raise ConfigError(f"Missing: {', '.join(missing)}. `--help` lists the arguments.")
    return values
