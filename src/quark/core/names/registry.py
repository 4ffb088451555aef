"""Registry: name -> entry. An unknown name lists the known ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from quark.core.names.scheme_families import suggestion
from quark.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """A mapping whose unknown keys raise ConfigError with the nearest names."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T) -> T:
        """Add `entry` under `name`; a name that is taken raises ConfigError."""
        if name in self._entries:
            raise ConfigError(f"The {self.kind} {name!r} is registered already; choose another name.")
        self._entries[name] = entry
        return entry

    def unregister(self, name: str) -> T:
        """Remove and return the entry named `name`."""
        entry = self[name]
        del self._entries[name]
        return entry

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except (KeyError, TypeError):
            hint = suggestion(str(name), self._entries) or did_you_mean(str(name), self._entries)
            raise ConfigError(f"Unknown {self.kind} {name!r}. {hint}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
