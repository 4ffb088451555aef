"""Files that another library maps into memory: what was read of them is given back before all of it is read."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_MAPS = Path("/proc/self/maps")
Mapping = tuple[int, int, str]
"""First byte, byte after the last one, path."""


class MappedFiles:
    """The files that this process maps from now on.

    Of what was mapped before, somebody may have written to his own copy of a page, which giving it back would undo.
    """

    def __init__(self) -> None:
        self._before = frozenset(_private_mappings())

    def release(self, paths: Collection[str | os.PathLike[str]]) -> None:
        """Give back the memory of mapped files that nobody writes to: values are read again when they are used.

        Elsewhere than on Linux nothing happens.

        Args:
            paths: The files.
        """
        real = {os.path.realpath(path) for path in paths}
        for mapping in _private_mappings():
            start, end, path = mapping
            if path in real and mapping not in self._before:
                with suppress(AttributeError):  # another C library
                    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _private_mappings() -> Iterator[Mapping]:
    """The parts of files that this process has mapped for itself, as Linux lists them."""
    if sys.platform != "linux":
        return
    with suppress(OSError, ValueError):
        for line in _MAPS.read_text(errors="surrogateescape").splitlines():
            place, rights, *_, path = line.split(maxsplit=5)
            if path.startswith("/") and rights.endswith("p"):
                start, _, end = place.partition("-")
                yield int(start, 16), int(end, 16), path
