"""How config classes are serialized: scopes, and values as JSON holds them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from quark.core.names.patterns import Subgraph
from quark.errors import ConfigError
from quark.onnx.config import enums as types


def as_scope(entry: Any) -> str | Subgraph:
    """A name, a regular expression, or ([starts], [ends]) as tuples.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(entry, str):
        return entry
    if isinstance(entry, (list, tuple)) and len(entry) == 2:
        starts, ends = entry
        if all(isinstance(side, (list, tuple)) and all(isinstance(n, str) for n in side) for side in (starts, ends)):
            return tuple(starts), tuple(ends)
    raise ConfigError(f"Expected a node name, a regular expression or ([start nodes], [end nodes]), got {entry!r}.")


def to_json(value: Any) -> Any:
    """Enums as "ScaleType.Float32", tuples as lists, inside lists and dicts too."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: to_json(entry) for key, entry in value.items()}
    return [to_json(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def from_json(value: Any) -> Any:
    """The inverse; texts that name no documented enum stay texts."""
    if isinstance(value, str):
        kind, _, name = value.partition(".")
        enum = getattr(types, kind, None) if name and kind in types.__all__ else None
        return enum[name] if enum is not None and name in enum.__members__ else value
    if isinstance(value, Mapping):
        return {key: from_json(entry) for key, entry in value.items()}
    return [from_json(entry) for entry in value] if isinstance(value, list) else value
