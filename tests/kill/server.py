"""Runs jobs in forked children of one process that has all libraries loaded, and ends them there.

By a signal, or by a disk that is full: a small file system in memory where this process may mount one, and else a limit
of the size of a file.
"""

from __future__ import annotations

import importlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quark.errors import QuarkError

RENAME, OTHER = "R", "."
RENAMES = ("os.rename", "ctypes.dlsym")
"""Events after which names mean something else; the second is the exchange of two."""
WATCHED = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate")
REFUSED, BROKEN = 1, 70
"""Exit codes of a child: of an error of quark's, and of any other."""
LIMIT = 300
"""Seconds after which a child that hangs is ended."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Moment:
    """When to end a job: before the file event of a number, counted from 1, or after so many seconds; never by default.

    Attributes:
        signal: By which.
        room: In the place of both: share of what the job writes for which its disk has room.
    """

    event: int | None = None
    seconds: float | None = None
    signal: signal.Signals = signal.SIGKILL
    room: float | None = None

    def __str__(self) -> str:
        if self.room is not None:
            return f"by a disk with room for {self.room:.2f} of it"
        when = f"before event {self.event}" if self.event else f"after {self.seconds or 0:.3f} s"
        return f"{when} by {self.signal.name}"


class EndedError(Exception):
    """A command ended with another exit code than 0, as it may.

    Attributes:
        code: Its exit code.
    """

    def __init__(self, code: Any, said: str) -> None:
        super().__init__(said)
        self.code = int(code)


@dataclass(frozen=True)
class End:
    """How a child ended.

    Attributes:
        code: Exit code; below 0 that of a signal.
        kinds: A letter for each file event that it lived through: RENAME or OTHER.
        seconds: On the wall.
    """

    code: int
    kinds: str
    seconds: float

    @property
    def events(self) -> int:
        """How many file events there were."""
        return len(self.kinds)

    def around_renames(self, reach: int = 2) -> list[int]:
        """The events, counted from 1, at, right before and right behind a rename: what is not whole shows there."""
        renames = [place + 1 for place, kind in enumerate(self.kinds) if kind == RENAME]
        near = {place + step for place in renames for step in range(1 - reach, reach + 1)}
        return sorted(near & set(range(1, self.events + 1)))


def fork(action: Callable[[], None], folder: Path, moment: Moment, log: Path) -> End:
    """Run an action that writes into a folder in a child.

    Args:
        action: What to run.
        folder: Where file events are counted.
        moment: When to kill the child.
        log: What it prints goes there.
    """
    reader, writer = os.pipe()
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        _be_child(action, folder, moment, log, writer)
    os.close(writer)
    if moment.seconds is not None:
        time.sleep(moment.seconds)
        os.kill(child, moment.signal)
    with os.fdopen(reader, "rb") as pipe:
        kinds = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return End(os.waitstatus_to_exitcode(status), kinds, time.perf_counter() - start)


class Disk:
    """A file system of a few bytes at a folder, in memory; where none can be mounted, a limit of the size of a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.mounts = self._mount("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", os.fspath(folder))
        self.clear()

    def make(self, size: int) -> None:
        """Mount one of so many bytes on the folder, which is empty."""
        if self.mounts:
            self._mount("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", os.fspath(self.folder))

    def limit(self, size: int) -> None:
        """In a child: let no file become larger, where there is no such disk."""
        if not self.mounts:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def grow(self) -> None:
        """Give it room for all."""
        if self.mounts:
            self._mount("mount", "-o", "remount,size=1g", os.fspath(self.folder))

    def clear(self) -> None:
        """Unmount it, and remove the folder."""
        if self.folder.is_mount():
            self._mount("umount", os.fspath(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)

    @staticmethod
    def _mount(*command: str) -> bool:
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:  # there is no such program
            return False


def modules_of(log: Path) -> Path:
    """Where a child that ran to the end says which modules it loaded."""
    return log.with_suffix(".modules")


def load_modules(log: Path) -> None:
    """Load what the last child loaded: the next ones have it from the start."""
    for name in modules_of(log).read_text().splitlines():
        if name not in sys.modules:
            with suppress(Exception):  # some are no modules of their own
                importlib.import_module(name)


def _be_child(action: Callable[[], None], folder: Path, moment: Moment, log: Path, writer: int) -> None:
    code = BROKEN
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        signal.alarm(LIMIT)
        # As a shell starts a program; this one may have been started with some of them ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        random.seed(0)
        sys.addaudithook(_Watch(folder, moment, writer))
        action()
        code = 0
        modules_of(log).write_text("\n".join(sys.modules))
    except EndedError as end:
        sys.stderr.write(str(end))
        code = end.code
    except QuarkError as error:
        sys.stderr.write(f"quark: {error}\n")
        code = REFUSED
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001 - a child must not return into the server
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class _Watch:
    """An audit hook that tells of each change of a file in the folder, by a letter, and kills before a certain one."""

    def __init__(self, folder: Path, moment: Moment, writer: int) -> None:
        self.root, self.moment, self.writer, self.count = os.fspath(folder), moment, writer, 0

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._is_change(event, arguments):
            return
        self.count += 1
        if self.count == self.moment.event:
            os.kill(os.getpid(), self.moment.signal)
        os.write(self.writer, (RENAME if event in RENAMES else OTHER).encode())

    def _is_change(self, event: str, arguments: tuple[object, ...]) -> bool:
        if event == "ctypes.dlsym":  # two names are about to be exchanged
            return arguments[1] in ("renameat2", "renamex_np")
        if event == "open":
            path, _, flags = arguments
            return isinstance(flags, int) and bool(flags & WRITES) and self._inside(path)
        # With a descriptor of a folder, as shutil.rmtree calls them, a path is a bare name.
        return event in WATCHED and any(self._inside(x) or (isinstance(x, str) and os.sep not in x) for x in arguments)

    def _inside(self, path: object) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.root)
