"""The two kinds of models that commands take, and the options that belong to one kind only."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TypeVar

import typer

from quark.base.files import require_config, require_regular
from quark.errors import UsageError
from quark.jobs.denoisers import is_denoiser_file
from quark.jobs.folders.sentence_encoders import is_sentence_encoder
from quark.jobs.options import FOR_FILES, FOR_FOLDERS
from quark.jobs.request import is_adapter, is_gguf, is_onnx, is_pipeline

T = TypeVar("T")
onnx_option = partial(typer.Option, rich_help_panel=FOR_FILES)


def check_options(context: typer.Context, model: Path) -> None:
    """Raise UsageError when an option was given that belongs to the other kind of model.

    Args:
        context: What was given.
        model: The model.
    """
    own, other = (FOR_FILES, FOR_FOLDERS) if is_onnx(model) else (FOR_FOLDERS, FOR_FILES)
    panels = {param.name: getattr(param, "rich_help_panel", None) for param in context.command.params}
    for name, panel in panels.items():
        source = context.get_parameter_source(name or "")
        if panel == other and source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"{_flag(name)} does not apply to {model}: it is {other[0].lower()}{other[1:]}. Possible here: "
                f"{', '.join(_flag(n) for n, panel in panels.items() if panel == own)}."
            )


def require_model(model: Path) -> None:
    """Raise FormatError for a path where no model can be, before the libraries that read one load."""
    if is_onnx(model) or is_gguf(model) or is_denoiser_file(model):
        require_regular(model)
    elif not any(has(model) for has in (is_pipeline, is_adapter, is_sentence_encoder)):
        require_config(model)


def require(value: T | None, flag: str, model: Path) -> T:
    """The value of an option that this kind of model needs. Raises UsageError when it is missing."""
    if value is None:
        raise UsageError(f"Missing option {flag}, which {model} needs.")
    return value


def _flag(name: str | None) -> str:
    return "--" + (name or "").replace("_", "-")
