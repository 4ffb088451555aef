"""Which layer gets which spec: exclude > by name > by type > global. A pattern that matches nothing is an error.

In the calls that published scripts make it is a warning, as it changes nothing there: `unmatched_as_documented`.

A pattern is an fnmatch pattern on the full name ("*.q_proj", "lm_head"), or "re:" and a regular expression that
matches the whole name.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from quark.base.bounded_regex import full_match
from quark.base.log import logger
from quark.errors import ConfigError, did_you_mean

T = TypeVar("T")

Subgraph = tuple[tuple[str, ...], tuple[str, ...]]
"""Of an ONNX graph: (start nodes, end nodes), the nodes on paths from one to the other."""

Scope = str | Subgraph | frozenset[str]
"""Nodes of an ONNX graph: a name, a glob, a regular expression ("re:", or "^" at its start and ".*" in it), a subgraph,
or the names that these stood for in the float model.
"""


def matches(name: str, pattern: str) -> bool:
    """Return True where the full name matches the pattern. Raises ConfigError for no pattern, or a slow one."""
    if pattern.startswith("re:"):
        return full_match(pattern[3:], name)
    return fnmatch.fnmatchcase(name, pattern)


def first_match(name: str, rules: Mapping[str, T]) -> T | None:
    """The value of the first pattern of `rules` that matches, in the order of the mapping."""
    return next((value for pattern, value in rules.items() if matches(name, pattern)), None)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return True where one of the patterns matches."""
    return any(matches(name, pattern) for pattern in patterns)


_warned: ContextVar[set[str] | None] = ContextVar("what was warned of, where a pattern without a match is a warning")


@contextmanager
def unmatched_as_documented() -> Iterator[None]:
    """Within: what matches nothing is a warning, each once, as in the calls that published scripts make."""
    token = _warned.set(set())
    try:
        yield
    finally:
        _warned.reset(token)


def unmatched(message: str, strict: bool = False) -> None:
    """Raise ConfigError for something in a config that the model does not have, or warn; see `unmatched_as_documented`.

    Args:
        message: What it is, and what the model has, in whole sentences.
        strict: Whether it is an error in any case.
    """
    warned = _warned.get(None)
    if warned is None or strict:
        raise ConfigError(message)
    if message not in warned:
        warned.add(message)
        logger.warning("Changes nothing: %s", message)


def require_matches(patterns: Iterable[str], names: Iterable[str], where: str, strict: bool = False) -> None:
    """Say `unmatched` of each pattern that matches none of `names`.

    Args:
        patterns: Patterns as the user wrote them.
        names: Everything that could be meant.
        where: The config field, for the message.
        strict: As for `unmatched`.
    """
    names = list(names)
    for pattern in patterns:
        try:
            matched = any(matches(name, pattern) for name in names)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if not matched:
            literal = pattern.removeprefix("re:").replace("*", "")
            near = [name for name in names if literal and literal in name][:5]
            # Of many names their last parts, which is what a pattern mostly ends with.
            ends = set(names) if len(names) <= 12 else {name.rsplit(".", 1)[-1] for name in names}
            hint = f"Names that contain it: {', '.join(near)}." if near else did_you_mean(literal, ends)
            unmatched(f"{where}: the pattern {pattern!r} matches no layer. {hint}", strict)
