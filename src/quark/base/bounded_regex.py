"""Bounded regular expressions, which cannot run for ever: a pattern of a file may be made to.

Python's `re` tries one way after the other, and "(a+)+b" has 2 ** n of them in n letters. A pattern of few
ways goes to `re`, and nearly all are. Any other is matched by sets of positions: where each of its parts may end, from
each place where it may begin, asked once. That takes steps in proportion to the pattern and to the square of the text.
They are counted.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from quark.errors import ConfigError

try:
    from re import _parser as parser  # type: ignore[attr-defined]  # Python 3.11
except ImportError:
    import sre_parse as parser

STEPS = 300_000
"""Per text: some 0.1 s."""
FAST = 20.0
"""Ways that `re` may have to try, as a power of two: it takes a tenth of that time."""
LONGEST = 10_000
"""Characters of a pattern."""
REPEATS, ASSERTIONS = ("MAX_REPEAT", "MIN_REPEAT"), ("ASSERT", "ASSERT_NOT")
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "DIGIT": lambda letter: letter.isdecimal(),
    "SPACE": lambda letter: letter.isspace(),
    "WORD": lambda letter: letter.isalnum() or letter == "_",
}


def full_match(pattern: str, text: str) -> bool:
    """Return True where a regular expression matches all of a text.

    Raises:
        ConfigError: It is no regular expression, or one that takes too long.
    """
    compiled, parsed = _compiled(pattern)
    if _ways(parsed, len(text)) <= FAST:
        return compiled.fullmatch(text) is not None
    return len(text) in _Positions(pattern, text).ends(parsed, {0})


@cache
def _compiled(pattern: str) -> tuple[re.Pattern[str], Any]:
    """A pattern that `re` compiled, and its tree."""
    if len(pattern) > LONGEST:
        raise ConfigError(f"The regular expression {pattern[:40]!r}... has more than {LONGEST} characters.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of sets that a later Python may read otherwise
            return re.compile(pattern), parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{pattern!r:.200} is not a regular expression: {error}.") from None


def _ways(items: Iterable[Any], length: int) -> float:
    """How many ways `re` may have to try in a text of so many letters, at most, as a power of two."""
    found = 0.0
    for operation, argument in items:
        name = str(operation)
        inner = [_ways(part, length) for part in _inside(name, argument)]
        found += math.log2(len(inner)) + max(inner) if name == "BRANCH" else sum(inner)
        if name in (*REPEATS, "POSSESSIVE_REPEAT"):
            least, most = int(argument[0]), min(int(argument[1]), length + int(argument[0]))
            found += math.inf if most > 1 and any(inner) else math.log2(max(most - least, 0) + 1)
    return found


def _inside(name: str, argument: Any) -> list[Any]:
    """The sequences in an operation."""
    if name in (*REPEATS, "POSSESSIVE_REPEAT"):
        return [argument[2]]
    if name in ("BRANCH", *ASSERTIONS):
        return list(argument[1]) if name == "BRANCH" else [argument[1]]
    if name == "SUBPATTERN":
        return [argument[3]]
    if name == "ATOMIC_GROUP":
        return [argument]
    return [part for part in argument[1:] if part is not None] if name == "GROUPREF_EXISTS" else []


class _Positions:
    """Where the parts of a pattern end in a text, by where they begin."""

    def __init__(self, pattern: str, text: str) -> None:
        self.pattern, self.text, self.steps = pattern, text, 0
        self._known: dict[tuple[int, int], frozenset[int]] = {}

    def ends(self, items: Iterable[Any], starts: Iterable[int]) -> set[int]:
        """Where a sequence may end."""
        places = set(starts)
        for item in items:
            self.steps += len(places)
            places = {end for start in places for end in self._item(item, start)}
        return places

    def _item(self, item: Any, start: int) -> frozenset[int]:
        key = (id(item), start)
        if key not in self._known:
            self.steps += 1
            self._known[key] = frozenset(self._ends_of(str(item[0]), item[1], start))
            self.steps += len(self._known[key])
            if self.steps > STEPS:
                raise ConfigError(f"The regular expression {self.pattern!r:.100} takes too long on {self.text!r:.60}.")
        return self._known[key]

    def _ends_of(self, name: str, argument: Any, start: int) -> Iterable[int]:
        if name in REPEATS:
            return self._repeated(argument[0], argument[1], argument[2], start)
        if name == "SUBPATTERN":
            if argument[1] or argument[2]:
                raise self._unknown("flags of a part")
            return self.ends(argument[3], {start})
        if name == "BRANCH":
            return {end for way in argument[1] for end in self.ends(way, {start})}
        if name in ASSERTIONS:
            return [start] if self._asserted(argument[0], argument[1], start) == (name == "ASSERT") else []
        if name == "AT":
            return [start] if self._is_at(str(argument), start) else []
        if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            fits = start < len(self.text) and self._fits(name, argument, self.text[start])
            return [start + 1] if fits else []
        raise self._unknown(name)

    def _repeated(self, least: int, most: Any, items: Any, start: int) -> set[int]:
        places, count = {start}, 0
        while count < least and places:
            following = self.ends(items, places)
            if following == places:
                break  # of nothing: any number of times
            places, count = following, count + 1
        found, new = set(places), set(places)
        while new and count < int(most):
            new = self.ends(items, new) - found
            found |= new
            count += 1
        return found

    def _asserted(self, direction: int, items: Any, start: int) -> bool:
        if direction > 0:
            return bool(self.ends(items, {start}))
        return any(start in self.ends(items, {before}) for before in range(start + 1))

    def _is_at(self, name: str, start: int) -> bool:
        text, last = self.text, len(self.text)
        if name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return start == 0
        if name in ("AT_END", "AT_END_STRING"):
            return start == last or (name == "AT_END" and start == last - 1 and text[start] == "\n")
        if name in ("AT_BOUNDARY", "AT_NON_BOUNDARY"):
            word = _CATEGORIES["WORD"]
            sides = [place for place in (start - 1, start) if 0 <= place < last and word(text[place])]
            return (len(sides) == 1) == (name == "AT_BOUNDARY")
        raise self._unknown(name)

    def _fits(self, name: str, argument: Any, letter: str) -> bool:
        if name == "ANY":
            return letter != "\n"
        if name != "IN":
            return (ord(letter) == argument) == (name == "LITERAL")
        negated = bool(argument) and str(argument[0][0]) == "NEGATE"
        return any(self._in(str(kind), value, letter) for kind, value in argument[negated:]) != negated

    def _in(self, kind: str, value: Any, letter: str) -> bool:
        if kind == "LITERAL":
            return ord(letter) == int(value)
        if kind == "RANGE":
            return bool(value[0] <= ord(letter) <= value[1])
        if kind == "CATEGORY":
            category = str(value).removeprefix("CATEGORY_")
            return _CATEGORIES[category.removeprefix("NOT_")](letter) != category.startswith("NOT_")
        raise self._unknown(kind)

    def _unknown(self, name: str) -> ConfigError:
        what = name.lower().replace("_", " ")
        return ConfigError(
            f"The regular expression {self.pattern!r:.100} has {what} beside repeats that take too long."
        )
