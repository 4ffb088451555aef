"""`quark-cli`: the documented program, its commands made of the functions of this package.

An argument that changes nothing here is a line in the log; a command that has no counterpart is an error that says what
to use. The program `quark` has what these commands do, and more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from quark.compat.quark_cli.llm_command import declare_llm, torch_llm_ptq
from quark.compat.quark_cli.onnx_commands import (
    declare_ptq,
    declare_search,
    declare_validate,
    onnx_autosearch,
    onnx_ptq,
    onnx_validate,
)
from quark.compat.quark_cli.other_commands import (
    absent,
    declare_export_oga,
    declare_export_onnx,
    declare_prepare,
    export_oga,
    export_onnx,
    onnx_prepare_data,
)
from quark.errors import QuarkError, one_line


def main(raw_args: Sequence[str] | None = None) -> None:
    """Run a command. A QuarkError becomes one line on stderr and exit code 1, a wrong command line exit code 2.

    Args:
        raw_args: What follows the program's name; by default what this process was started with.
    """
    args = get_cli_parser().parse_args(raw_args)
    try:
        args.func(args)
    except QuarkError as error:
        sys.stderr.write(f"quark-cli: {one_line(str(error))}\n")
        raise SystemExit(1) from None


def get_cli_parser() -> argparse.ArgumentParser:
    """The parser of all commands; `func` of what it returns runs the one that was asked for."""
    parser = argparse.ArgumentParser(prog="quark-cli", description="The documented program; see also `quark --help`.")
    commands = parser.add_subparsers(required=True, title="commands", help="-h after a command shows its arguments")
    for name, (help_text, func, declare) in _COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        declare(command.add_argument)
        command.set_defaults(func=func)
    return parser


_PASSES = "the options of quark.onnx.QConfig change graphs, with ShapeShifterYaml as a YAML file names them."
_COMMANDS: dict[str, tuple[str, Callable[[argparse.Namespace], None], Callable[[Callable[..., Any]], None]]] = {
    "onnx-ptq": ("quantize an ONNX file", onnx_ptq, declare_ptq),
    "onnx-autosearch": ("quantize an ONNX file by several configurations", onnx_autosearch, declare_search),
    "export-onnx": ("write a model of timm as an ONNX file", export_onnx, declare_export_onnx),
    "export-oga": ("write a model by ONNX Runtime GenAI", export_oga, declare_export_oga),
    "onnx-validate": ("accuracy of an ONNX image classifier", onnx_validate, declare_validate),
    "onnx-prepare-data": ("sort the validation images of ImageNet", onnx_prepare_data, declare_prepare),
    "torch-llm-ptq": ("quantize a language model", torch_llm_ptq, declare_llm),
    "torch-mixed-precision": absent("The planner", "quark quantize MODEL --bits 4.5 -o OUT chooses a scheme a layer."),
    "shapeshifter": absent("The engine of graph passes", _PASSES),
    "onnx-adapter": absent("The engine of graph passes", _PASSES),
}
"""Command -> its help, what runs it, and what declares its arguments."""
