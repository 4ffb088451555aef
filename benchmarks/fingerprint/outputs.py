"""The list of outputs, and the hash of one of them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quark.errors import QuarkError

MODELS = Path(__file__).parents[2] / "examples" / "models"
OUT = Path("out")
"""Where an output writes its files."""

OUTPUTS: dict[str, Callable[[], str | None]] = {}
"""Name -> what writes files to `OUT`, or returns a text, or both."""


def add(name: str, write: Callable[..., str | None], *arguments: Any) -> None:
    """Put an output on the list."""
    if name in OUTPUTS:
        raise ValueError(f"Two outputs are called {name}.")
    OUTPUTS[name] = partial(write, *arguments)


def fingerprint(name: str) -> str:
    """Write an output to an empty folder and hash it; of a refusal, hash what it says.

    Returns:
        16 hexadecimal digits; behind a refusal the name of the error.
    """
    silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with empty_folder(), silent[0], silent[1], warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed()
        try:
            return digest(OUT, OUTPUTS[name]())
        except QuarkError as error:
            kind = type(error).__name__
            return f"{digest(OUT, f'{kind}: {error}')}  {kind}"


def attempt(write: Callable[..., str | None], *arguments: Any) -> str:
    """What an output among several returns; where it is refused, the error."""
    try:
        return write(*arguments) or ""
    except QuarkError as error:
        return f"{type(error).__name__}: {error}\n"


def digest(folder: Path, text: str | None = None) -> str:
    """Hash the names and bytes of all files under a folder, and a text."""
    found = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(f"{file.relative_to(folder).as_posix()}\0{file.stat().st_size}\0".encode())
        found.update(file.read_bytes())
    if text is not None:
        found.update(text.encode())
    return found.hexdigest()[:16]


def hash_arrays(arrays: Any) -> str:
    """Hash dtypes, shapes and values of arrays."""
    found = hashlib.sha256()
    for array in map(np.asarray, arrays):
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


@contextlib.contextmanager
def empty_folder() -> Iterator[None]:
    """Work in a folder of its own, so that paths are relative: none gets into a file or an error from this machine."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="fingerprint-") as folder:
        os.chdir(folder)
        OUT.mkdir()
        Path("models").symlink_to(MODELS)
        try:
            yield
        finally:
            os.chdir(before)


def seed() -> None:
    """Seed what an output may draw from, whichever outputs were written before."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
