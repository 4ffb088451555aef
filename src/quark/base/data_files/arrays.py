"""Arrays of NumPy's files, of which every header is looked at before anything is unfolded.

An .npz file is a ZIP archive of .npy files. A megabyte of it may unfold to a gigabyte, a header may promise any shape,
and members may be encrypted, or packed in ways that this Python does not know.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from quark.base.files import require_regular
from quark.base.memory_and_disk import available_memory
from quark.errors import FormatError, QuarkError, one_line

SUFFIX = ".npy"
_PACKED = {zipfile.ZIP_STORED: "stored", zipfile.ZIP_DEFLATED: "deflated"}
_FREE = 1 << 28
"""Bytes that any file may unfold to."""
_RATIO = 100
"""Above them: so many bytes of arrays for each byte of a file. Data of real inputs have less than 20."""
_SHOWN = 200


@dataclass(frozen=True)
class ArrayHeader:
    """Shape, type and bytes of an array in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        """Of the array in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


Check = Callable[[Mapping[str, ArrayHeader]], None]
"""Raises QuarkError where arrays of these names, shapes and types are not wanted."""


def read_npz(path: Path, check: Check | None = None) -> dict[str, Any]:
    """The named arrays of an .npz file.

    Args:
        path: The file.
        check: Is called with the headers before values are read.

    Raises:
        FormatError: It is none, damaged, encrypted or packed otherwise than NumPy does it, holds Python objects, or
            would unfold to more than its size or the free memory allows; names it.
    """
    require_regular(path)
    try:
        with path.open("rb") as opened, zipfile.ZipFile(opened) as archive:
            members = {entry.filename.removesuffix(SUFFIX): entry for entry in archive.infolist()}
            headers = {name: _header_of(archive, entry) for name, entry in members.items()}
            _check_size(sum(header.bytes for header in headers.values()), path.stat().st_size)
            if check is not None:
                check(headers)
            return {name: _array_of(archive, entry) for name, entry in members.items()}
    except Exception as error:  # of zip, zlib and numpy: whatever a damaged archive gives
        if isinstance(error, QuarkError):
            raise
        raise FormatError(f"{path} is not an .npz file: {_reason(error)}") from error


def read_npy(path: Path) -> Any:
    """The array of an .npy file. Raises FormatError as `read_npz` does."""
    require_regular(path)
    try:
        with path.open("rb") as opened:
            header = _read_header(opened)
            rest = path.stat().st_size - opened.tell()
            if header.bytes != rest:
                raise ValueError(f"its header promises {header.bytes} bytes of {header.shape}, and {rest} follow")
            opened.seek(0)
            return np.lib.format.read_array(opened, allow_pickle=False)
    except Exception as error:
        raise FormatError(f"{path} is not an .npy file: {_reason(error)}") from error


def _header_of(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> ArrayHeader:
    """The header of a member, which fits its size. Raises ValueError."""
    name = entry.filename
    if entry.flag_bits & 1:
        raise ValueError(f"{name!r:.80} is encrypted; possible: without a password")
    if entry.compress_type not in _PACKED:
        raise ValueError(f"{name!r:.80} is packed in the way {entry.compress_type}; possible: as np.savez writes it")
    with archive.open(entry) as member:
        header = _read_header(member)
        if header.bytes != entry.file_size - member.tell():
            raise ValueError(
                f"the header of {name!r:.80} promises {header.bytes} bytes of shape {header.shape}, and "
                f"{entry.file_size - member.tell()} follow"
            )
    return header


def _read_header(file: IO[bytes]) -> ArrayHeader:
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"version {version} of its header is not read; possible: 1.0 and 2.0")
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not loaded. Possible for text: save array.astype(str)")
    if any(size < 0 for size in shape):
        raise ValueError(f"{shape} is no shape")
    return ArrayHeader(tuple(shape), dtype)


def _check_size(unfolded: int, stored: int) -> None:
    """Raise ValueError where arrays are larger than a file of this size, or the free memory, allows."""
    most = max(_FREE, _RATIO * stored)
    if unfolded > most:
        raise ValueError(
            f"its {stored} bytes unfold to {unfolded}, and at most {most} are read of it. Possible: np.savez"
        )
    free = available_memory()
    if free is not None and unfolded > free:
        raise ValueError(f"its arrays have {unfolded} bytes, and {free} bytes of memory are free")


def _array_of(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Any:
    with archive.open(entry) as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _reason(error: BaseException) -> str:
    """The message of another library in one line, which ends in a full stop."""
    text = one_line(getattr(error, "strerror", None) or error) or type(error).__name__
    return f"{text[:_SHOWN].rstrip('.')}."
