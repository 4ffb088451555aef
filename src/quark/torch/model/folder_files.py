"""The files of a model folder: each a regular file that lies in it.

A folder comes from elsewhere. A name or a link in it that leads out would be read, and copied into the output, with the
rights of whoever runs quark; a pipe or a device would be waited for without end.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath

from quark.errors import FormatError

SIDE_FILES = re.compile(
    r"tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|preprocessor|processor_config|\.model$|\.py$"
)
"""Files of a source checkpoint that travel along."""
_READ = re.compile(rf"{SIDE_FILES.pattern}|\.json$|\.safetensors$")
"""Files that quark, or transformers on its behalf, opens."""
_BLOB = re.compile(r"models--[^/]+/blobs/[0-9a-f]{40,64}$")
"""What the links in a snapshot of huggingface's cache lead to: contents under their hashes."""


def regular_file(path: Path) -> Path:
    """The path itself. Raises FormatError where there is no regular file, or a link to one; opens nothing."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:  # a NUL in the name
        raise FormatError(f"{str(path)!r} cannot be read: {error}.") from None
    if not stat.S_ISREG(mode):
        raise FormatError(f"{path} is a folder, a pipe or a device; a regular file is needed.")
    return path


def file_of(folder: Path, name: str) -> Path:
    """A regular file of a folder.

    Args:
        folder: The folder, which may itself be a link.
        name: Relative to it.

    Raises:
        FormatError: The name, or the link of that name, leads out of the folder; there is no such file, or no file.
    """
    parts = {*PurePosixPath(name).parts, *PureWindowsPath(name).parts}
    if ".." in parts or PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive:
        raise FormatError(f"{folder} names {name!r}, which leads out of it.")
    path = regular_file(folder / name)
    target = path.resolve()
    if not target.is_relative_to(folder.resolve()) and not _BLOB.search(target.as_posix()):
        raise FormatError(f"{path} is a link to {target}, out of its folder; copy the file to its place.")
    return path


def check_files(folder: Path) -> None:
    """Check every file of a folder that may be opened by its name. Raises FormatError as `file_of` does."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if _READ.search(path.name) and not path.is_dir():
            file_of(folder, path.name)


def side_files(folder: Path) -> list[Path]:
    """The files that travel along with a checkpoint. Raises FormatError as `file_of` does."""
    return [
        file_of(folder, path.name)
        for path in sorted(folder.iterdir())
        if SIDE_FILES.search(path.name) and not path.is_dir()
    ]
