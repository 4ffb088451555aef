"""Objects of JSON that every reader understands in one way: no name occurs twice, no value is NaN."""

from __future__ import annotations

import json
from typing import Any

_DIGITS = 308
"""Of an integer, with its sign: with more, no float has its value."""


def plain_json(text: str | bytes) -> Any:
    """Return the value of a text of JSON; Infinity, which limits of some models are, is allowed.

    Raises:
        ValueError: It is not JSON, an object has a name twice, its nesting is deeper than Python reads, an integer is
            beyond all floats, or a value is NaN, with which every output would be NaN.
    """
    try:
        return json.loads(text, object_pairs_hook=without_doubles, parse_constant=_constant, parse_int=_integer)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deep") from None


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of its entries. Raises ValueError for a name that occurs twice: readers differ in which one counts."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {double!r:.80} occurs twice")
    return made


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    """Return the differences between two settings, each as "name: one there, other now"."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other}, key=str)
        return [d for k in keys for d in differences(one.get(k), other.get(k), f"{name}.{k}".lstrip("."))]
    return [] if one == other else [f"{name}: {json.dumps(one)} there, {json.dumps(other)} now"]


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("it has the value NaN")
    return float(name)
