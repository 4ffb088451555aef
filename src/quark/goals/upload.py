"""The command that uploads what a job made, by the client of the Hugging Face hub; quark itself sends nothing."""

from __future__ import annotations

import glob
import shlex
from pathlib import Path

from quark.base.log import logger

_REPOSITORY = "USER/NAME"
"""Stands for the repository, whose name is the user's to choose."""
EXTERNAL = (".data", "_data")
"""Ends of the names of files beside an ONNX file that hold its weights."""


def say_upload(made: Path) -> None:
    """Log the command that uploads a folder or a file, as the last line of the job that made it."""
    logger.info("To put it on the Hugging Face hub: %s", upload_command(made))


def upload_command(made: Path) -> str:
    """The command that uploads a folder with all that it holds, or a file, with the external data of an ONNX file."""
    if made.is_dir() or not any(made.with_name(made.name + end).is_file() for end in EXTERNAL):
        return f"hf upload {_REPOSITORY} {shlex.quote(str(made))}"
    pattern = shlex.quote(f"{glob.escape(made.name)}*")
    return f"hf upload {_REPOSITORY} {shlex.quote(str(made.parent))} . --include {pattern}"
