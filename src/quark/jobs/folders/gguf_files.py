"""A GGUF file where a job reads a model folder: the folder is made of it beside the output, and gone after the job."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from quark.base.files import scratch_folder, temporary_folder
from quark.base.log import logger
from quark.errors import ConfigError, did_you_mean
from quark.jobs.request import is_gguf
from quark.jobs.words import DTYPES

if TYPE_CHECKING:
    import torch

    from quark.torch.writers.gguf.folder_of_file import FolderOfFile

_ROUNDED = "values of its blocks are rounded to it (--dtype float32 keeps them)"


def dtype_named(name: str) -> torch.dtype | None:
    """The type of --dtype; None for auto. Raises ConfigError for a name of none."""
    import torch  # where a file is really read

    if name not in DTYPES:
        raise ConfigError(f"--dtype {name!r} is unknown. {did_you_mean(name, DTYPES)}")
    return None if name == "auto" else getattr(torch, name)


@contextmanager
def opened_gguf(file: Path, dtype: str, output: Path | None = None) -> Iterator[FolderOfFile]:
    """Yield the model folder of a GGUF file, without tensors until these are asked for; it is gone when the body ends.

    Args:
        file: The file.
        dtype: A value of --dtype.
        output: What the folder lies beside; None: in the place for temporary files.

    Raises:
        QuarkError: As `folder_of_gguf`, or the type is unknown.
    """
    from quark.torch.writers.gguf.folder_of_file import folder_of_gguf

    wanted = dtype_named(dtype)
    place = scratch_folder(Path(tempfile.gettempdir())) if output is None else temporary_folder(output.absolute())
    with place as scratch:
        yield folder_of_gguf(file, scratch / file.stem, wanted)


@contextmanager
def as_folder(model: Path, dtype: str = "auto", weights: bool = True) -> Iterator[Path]:
    """Yield the folder to read for a model: itself, or that of a GGUF file, which is gone when the body ends.

    Args:
        model: A folder or a GGUF file.
        dtype: A value of --dtype, for a file.
        weights: Whether it has tensors; a plan needs none.
    """
    if not is_gguf(model):
        yield model
        return
    with opened_gguf(model, dtype) as made:
        if weights:
            fill(made)
        yield made.path


def fill(made: FolderOfFile) -> None:
    """Write the tensors of a folder, and say what becomes of them."""
    dtype = str(made.dtype).removeprefix("torch.")
    exact = made.tensors.holds_all()
    logger.info("Reading %s as %s: %s.", made.file, dtype, "its values as they are" if exact else _ROUNDED)
    made.fill()
