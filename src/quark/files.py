"""Outputs that are whole or absent: written under a temporary name in the same folder, then renamed."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quark.errors import OutputError, OutputExistsError


@contextmanager
def atomic_folder(path: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` when the body ends, and vanishes when it fails.

    Raises:
        OutputExistsError: `path` is a file or a folder that is not empty, and `overwrite` is False.
        OutputError: The disk is full or the folder cannot be written.
    """
    target = Path(path)
    refuse_existing(target, overwrite)
    temporary = _beside(target)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        replace_folder(temporary, target)
    except OSError as error:
        raise _output_error(target, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_folder(folder: Path, target: Path) -> None:
    """Rename a folder to `target`, which is replaced if it is there. Raises OutputError and leaves all as it was."""
    old = _beside(target)
    try:
        if target.exists():
            target.rename(old)
        folder.rename(target)
    except OSError as error:
        if old.exists() and not target.exists():
            old.rename(target)
        raise _output_error(target, error) from error
    if old.exists():
        shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink()


@contextmanager
def atomic_file(path: str | os.PathLike[str], overwrite: bool = True) -> Iterator[Path]:
    """Yield a temporary path whose file becomes `path` when the body ends, and vanishes when it fails."""
    target = Path(path)
    if not overwrite:
        refuse_existing(target, overwrite)
    temporary = _beside(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(target)
    except OSError as error:
        raise _output_error(target, error) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_files(folder: str | os.PathLike[str], names: Iterable[str], overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder whose files move into `folder`, beside what is there, when the body ends.

    Args:
        folder: Made if it is not there.
        names: Of the files, in the order in which they move; one that the body did not write, and that is there, goes.
        overwrite: Replace files of these names.

    Raises:
        OutputExistsError: One of the files is there already, and `overwrite` is False.
        OutputError: The disk is full or the folder cannot be written.
    """
    target, names = Path(folder), list(names)
    for name in names:
        refuse_existing(target / name, overwrite)
    temporary = _beside(target)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            if (temporary / name).exists():
                (temporary / name).replace(target / name)
            else:
                (target / name).unlink(missing_ok=True)
    except OSError as error:
        raise _output_error(target, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(target: Path, overwrite: bool) -> None:
    """Raise OutputExistsError for a file, or a folder that is not empty, unless it may be replaced."""
    empty_folder = target.is_dir() and not any(target.iterdir())
    if target.exists() and not empty_folder and not overwrite:
        raise OutputExistsError(
            f"{target} exists already. Choose another output, or replace it with overwrite (--force)."
        )


def _beside(target: Path) -> Path:
    return target.parent / f".{target.name}.tmp-{uuid.uuid4().hex[:8]}"


def _output_error(target: Path, error: OSError) -> OSError:
    if isinstance(error, (OutputError, OutputExistsError)):
        return error
    return OutputError(f"Could not write {target}: {error.strerror or error}. Nothing was left behind.")
