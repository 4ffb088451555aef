"""The free memory and disk, and errors where a job would certainly find too little of either, hours later.

Also gives freed memory back.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from quark.errors import OutputError, TooLittleMemoryError

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Bytes that this process may still take, swap included and within the limit of its container; None: unknown."""
    rows: dict[str, int] = {}
    with suppress(OSError, ValueError):
        for line in (PROC / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemAvailable", "SwapFree"):
                rows[name] = int(rest.split()[0]) * 1024
    if "MemAvailable" not in rows:
        return None
    # Of the limit nothing is taken off for what the container holds: most of that is files, which give way.
    return min([sum(rows.values()), *_limits()])


def is_out_of_memory(error: BaseException) -> bool:
    """Return True where an error says that the memory of the host or of a device is full, whoever raised it."""
    # PyTorch's own class is not imported here; a driver that is called by another library only says it, and libraries
    # of products have a status of their own (CUBLAS_STATUS_ALLOC_FAILED).
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    said = str(error).lower() if isinstance(error, RuntimeError) else ""
    return known or "out of memory" in said or "status_alloc_failed" in said


def asked_bytes(error: BaseException) -> str:
    """How much memory was asked for when there was too little, as PyTorch says it: "2.00 GiB"; empty: unknown."""
    found = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    return found[1] if found else ""


def give_back_memory() -> None:
    """Return freed memory to the system: glibc keeps it, in pieces that do not fit what comes next, and so grows.

    Elsewhere nothing happens. Costs about a millisecond, and a page fault for each page that is used again.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def _limits() -> list[int]:
    """The limits of the control groups that this process is in, version 2 or 1."""
    found = []
    with suppress(OSError):
        for line in (PROC / "self" / "cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds in ("", "memory"):
                root = CGROUPS / kinds
                file = "memory.max" if kinds == "" else "memory.limit_in_bytes"
                for folder in (root / path.lstrip("/"), root):  # in a container its own group may be the root
                    with suppress(OSError, ValueError):
                        found.append(int((folder / file).read_text()))
    return found


def memory_in_use() -> int:
    """Bytes of memory that this process has now; 0: unknown."""
    with suppress(OSError, ValueError):
        return int((PROC / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def free_disk(path: str | os.PathLike[str]) -> int | None:
    """Bytes that this user may still write where `path` is, or is to be; None: unknown."""
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
    for folder in (absolute, *absolute.parents):
        with suppress(OSError):
            return shutil.disk_usage(folder).free
    return None


def check_disk(path: str | os.PathLike[str], needed: int) -> None:
    """Raise OutputError where `needed` bytes do not fit beside what is at `path`, which is replaced at the end."""
    free = free_disk(path)
    if free is not None and needed > free:
        raise OutputError(
            # By its name: it is made in a temporary folder beside its place.
            f"The output {Path(path).name!r} will take about {needed / 1e6:.2f} MB, and {free / 1e6:.2f} MB are free "
            "on its disk. Possible: another disk, or a scheme of fewer bits."
        )


def check_memory(needed: int, what: str, possible: str) -> None:
    """Raise TooLittleMemoryError where `needed` bytes are more than there are.

    Args:
        needed: The least that the job can do with.
        what: What takes them.
        possible: What to do, a sentence without its first word.
    """
    free = available_memory()
    if free is not None and needed > free:
        raise TooLittleMemoryError(
            f"{what} takes at least {needed / 1e9:.2f} GB of memory, and {free / 1e9:.2f} GB are free. "
            f"Possible: {possible}."
        )
