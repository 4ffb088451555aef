"""Runs a function in a forked process with limits, and says how that ended."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quark.errors import QuarkError

NOBODY = 65534
FILE_BYTES = 2 << 30


@dataclass(frozen=True)
class Limits:
    """Of a child: seconds on the wall, and bytes of memory of its own."""

    seconds: float = 20.0
    memory: int = 6 << 30


@dataclass(frozen=True)
class Ending:
    """How a child ended.

    Attributes:
        how: "returned", "refused" (a QuarkError, or an error of the command line's parser), "foreign", "wrong" (a
            WrongError), "hang" or "crash".
        text: Message or traceback.
        value: What the function gave.
        grown: Bytes of memory that it took more than it began with, at most.
        connected: Whom Python connected to, or asked for.
        out, err: What was printed.
    """

    how: str
    text: str = ""
    value: Any = None
    grown: int = 0
    connected: str = ""
    out: str = ""
    err: str = ""


def in_child(work: Callable[[], Any], logs: Path, limits: Limits, nobody: bool = False) -> Ending:
    """Run `work` in a fork of this process.

    Args:
        work: Its result is JSON.
        logs: Folder for what is printed; made here.
        limits: Past them the child and all that it started are killed.
        nobody: Give up the rights of root.
    """
    logs.mkdir(parents=True, exist_ok=True)
    read, write = os.pipe()
    with warnings.catch_warnings():
        # Python warns of forks where there are threads; the libraries that are loaded here wait for work in theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        os.close(read)
        _child(work, logs, limits, nobody, write)
    os.close(write)
    sent = _received(read, limits.seconds)
    _end(process)
    status = os.waitpid(process, 0)[1]
    out, err = (_text(logs / name) for name in ("out", "err"))
    if sent is None:
        return Ending("hang", f"more than {limits.seconds:.0f} s", out=out, err=err)
    if not sent:
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
        return Ending("crash", how, out=out, err=err)
    return Ending(**json.loads(sent), out=out, err=err)


def _child(work: Callable[[], Any], logs: Path, limits: Limits, nobody: bool, write: int) -> None:
    """What the child does; it never returns."""
    ending: dict[str, Any] = {"how": "foreign", "text": "the child could not be set up"}
    try:
        os.setsid()
        for name, descriptor in (("out", 1), ("err", 2)):
            os.dup2(os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # As Python opens them under UTF-8.
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_DATA, (limits.memory, limits.memory))
        connected, before = _watch_connections(), _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        if nobody and os.getuid() == 0:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        ending = _ending(work)
        ending |= {"grown": _memory("VmHWM") - before, "connected": ", ".join(connected)}
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with open(write, "w", encoding="utf-8") as pipe:
            json.dump(ending, pipe)
        os._exit(0)


def _memory(name: str) -> int:
    """A line of the system on this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def _watch_connections() -> list[str]:
    """A list that gets the address of each connection from here on, but to a socket of this machine, which is a path.

    The guard of quark, whose hook is asked first, may have refused it before.
    """
    found: list[str] = []

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg") and isinstance(arguments[1], tuple):
            found.append(str(arguments[1]))
        elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
            found.append(str(arguments[0]))

    sys.addaudithook(see)
    return found


def _ending(work: Callable[[], Any]) -> dict[str, Any]:
    from tests.fuzz.case import WrongError

    try:
        return {"how": "returned", "value": work()}
    except WrongError as error:
        return {"how": "wrong", "text": str(error)}
    except QuarkError as error:
        return {"how": "refused", "text": str(error)}
    except BaseException:  # noqa: BLE001 - an exit, too, is nothing that the work may do
        return {"how": "foreign", "text": traceback.format_exc()}


def _received(read: int, seconds: float) -> str | None:
    """What the child writes until it closes the pipe; None after the time. A pipe, as its end is the child's too."""
    end, parts = time.monotonic() + seconds, list[bytes]()
    try:
        while True:
            left = end - time.monotonic()
            if left <= 0 or not select.select([read], [], [], left)[0]:
                return None
            part = os.read(read, 1 << 16)
            if not part:
                return b"".join(parts).decode()
            parts.append(part)
    finally:
        os.close(read)


def _end(process: int) -> None:
    """Kill the child and what it started: it leads a session of its own."""
    for kill in (os.killpg, os.kill):
        try:
            kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
