"""A function in a process of its own, with a limit of time and one of memory: a family may take all of either."""

from __future__ import annotations

import os
import pickle
import resource
import signal
from collections.abc import Callable
from typing import Any

MEMORY = 8 * 2**30
"""Bytes of address space beyond which a process gets a MemoryError."""


class DiedError(Exception):
    """The process ended without a result; says how."""


def isolated(function: Callable[[], Any], seconds: int) -> Any:
    """What `function` returns, computed in a fork of this process: what is imported need not be imported again.

    Args:
        function: Its result is pickled, and what it writes to stderr is dropped.
        seconds: Of wall time, after which the process is ended.

    Raises:
        DiedError: It raised, took too long, or was killed.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        signal.alarm(seconds)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            answer = (True, function())
        except BaseException as error:  # noqa: BLE001 - the other process raises it
            answer = (False, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        with os.fdopen(write_end, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    if not content:
        number = os.waitstatus_to_exitcode(status)
        raise DiedError(f"more than {seconds} s" if -number == signal.SIGALRM else f"exit code {number}")
    worked, answer = pickle.loads(content)
    if not worked:
        raise DiedError(answer)
    return answer
