"""Garbage: importing torch and transformers makes near a million objects that stay.

Each time their number has grown by a quarter, Python looks through all of them for cycles without an owner, which is a
sixth of the time in which a command starts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Look for no garbage inside, where libraries are imported and a plan is made; who switched it off keeps it off."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
