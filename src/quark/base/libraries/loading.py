"""Loading a stranger's folder by a library: all that it raises becomes one error, and it can connect to nobody.

A folder can name what is loaded next: a base model, an adapter of an adapter, a tokenizer of another repository. That
a library asks no server for it (`local_files_only`) is its own promise; here an audit hook refuses the connection,
whichever library wants it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from quark.errors import LONGEST, FormatError, QuarkError, is_panic, one_line

ASKED = frozenset({"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"})
"""Events of a look-up, whose first argument is the host; of a connection the address is the second."""
CONNECTED = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg"})

_refused: ContextVar[list[str] | None] = ContextVar("refused", default=None)


@contextmanager
def as_format_error(folder: Path, what: str = "cannot be loaded", trusted: bool = False) -> Iterator[None]:
    """Whatever transformers, its configs, safetensors or tokenizers raise for a bad folder becomes a FormatError.

    Args:
        folder: What is loaded, for the message.
        what: What is wrong with it then.
        trusted: Whether code of the folder runs, which may connect to whom it likes; else this thread cannot, within.
    """
    asked: list[str] = []
    token = None if trusted else _refused.set(asked)
    _watch()
    try:
        yield
    except (QuarkError, MemoryError):
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        if asked:
            raise FormatError(
                f"{folder} {what}: it leads to a connection to {asked[0]}, and a folder is read without any. Possible: "
                "a folder that holds what it names."
            ) from error
        message = one_line(error)
        kind = "" if isinstance(error, (OSError, ValueError, RuntimeError)) and message else f"{type(error).__name__}: "
        shown = message if len(message) <= LONGEST else f"{message[:LONGEST]} ..."
        raise FormatError(f"{folder} {what}: {kind}{shown}".rstrip(": ")) from error
    finally:
        if token is not None:
            _refused.reset(token)


@cache
def _watch() -> None:
    """Add the hook, once: Python has no way to take one away."""
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if not event.startswith("socket.") or event not in ASKED | CONNECTED:
        return
    asked = _refused.get()
    if asked is None:
        return
    address = args[0] if event in ASKED else args[1]
    if event in CONNECTED and not isinstance(address, tuple):
        return  # a socket of this machine, which has a path
    shown = one_line(address[0] if isinstance(address, tuple) else address)
    asked.append(shown)
    raise ConnectionRefusedError(f"A folder is read, and no connection is made to {shown}.")
