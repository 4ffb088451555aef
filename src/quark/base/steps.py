"""Named steps of long jobs, and who watches them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

WATCHERS: list[Callable[[str], AbstractContextManager[object]]] = []
"""Each is called with the name of a step, and gives what is entered while the step runs."""


def step(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: each call of the function is a step of this name."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def watched(*args: P.args, **options: P.kwargs) -> T:
            with ExitStack() as stack:
                for watcher in WATCHERS:
                    stack.enter_context(watcher(name))
                return function(*args, **options)

        return watched

    return decorate
