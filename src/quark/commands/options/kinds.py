"""The two kinds of models that commands take, and the options that belong to one kind only."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TypeVar

import typer

from quark.errors import UsageError
from quark.files import require_config, require_regular

T = TypeVar("T")
TORCH, ONNX = "For a folder (PyTorch)", "For an ONNX file"
"""Panels of --help: an option in one of them belongs to that kind."""
folder_option = partial(typer.Option, rich_help_panel=TORCH)
onnx_option = partial(typer.Option, rich_help_panel=ONNX)


def is_onnx(model: Path) -> bool:
    """Whether the model is an ONNX file, by its name."""
    return model.suffix.lower() == ".onnx"


def check_options(context: typer.Context, model: Path, shared: Collection[str] = ()) -> None:
    """Raise UsageError when an option was given that belongs to the other kind of model.

    Args:
        context: What was given.
        model: The model.
        shared: Names of options that this time say something of either kind.
    """
    own, other = (ONNX, TORCH) if is_onnx(model) else (TORCH, ONNX)
    panels = {param.name: getattr(param, "rich_help_panel", None) for param in context.command.params}
    for name, panel in panels.items():
        source = context.get_parameter_source(name or "")
        if name not in shared and panel == other and source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"{_flag(name)} does not apply to {model}: it is {other[0].lower()}{other[1:]}. Possible here: "
                f"{', '.join(_flag(n) for n, panel in panels.items() if panel == own)}."
            )


def require_model(model: Path) -> None:
    """Raise FormatError for a path where no model can be, before the libraries that read one load."""
    if is_onnx(model):
        require_regular(model)
    else:
        require_config(model)


def require(value: T | None, flag: str, model: Path) -> T:
    """The value of an option that this kind of model needs. Raises UsageError when it is missing."""
    if value is None:
        raise UsageError(f"Missing option {flag}, which {model} needs.")
    return value


def _flag(name: str | None) -> str:
    return "--" + (name or "").replace("_", "-")
