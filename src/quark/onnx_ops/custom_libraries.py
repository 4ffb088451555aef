"""Libraries of operators of the user's own (UserCustomOpLibPath): every session registers those that are in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from quark.errors import ConfigError, one_line

if TYPE_CHECKING:
    import onnxruntime

SUFFIXES = (".so", ".dll", ".dylib")
_IN_USE: list[tuple[str, ...]] = []
"""Of the whole process: sessions are opened in threads of their own too."""


def find_libraries(path: str) -> tuple[str, ...]:
    """The libraries that a path names: a file, or all in a folder, by name.

    Raises:
        ConfigError: There is none.
    """
    place = Path(path)
    found = [place] if place.is_file() else sorted(entry for entry in place.glob("*") if entry.suffix in SUFFIXES)
    if not found:
        raise ConfigError(
            f"UserCustomOpLibPath={path!r}: expected a library of operators, or a folder that holds some "
            f"({', '.join('*' + suffix for suffix in SUFFIXES)}). Operators in Python are not part of this version."
        )
    return tuple(str(entry.resolve()) for entry in found)


@contextmanager
def custom_libraries(paths: Sequence[str]) -> Iterator[None]:
    """Within: every session registers these libraries."""
    entry = tuple(paths)
    _IN_USE.append(entry)
    try:
        yield
    finally:
        _IN_USE.remove(entry)


def session_options() -> onnxruntime.SessionOptions:
    """Options of a session, which knows the operators of the user's own.

    Raises:
        ConfigError: A library does not load.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    for path in dict.fromkeys(path for entry in _IN_USE for path in entry):
        try:
            options.register_custom_ops_library(path)
        except Exception as error:
            raise ConfigError(f"UserCustomOpLibPath: {path} is no library of operators: {one_line(error)}") from error
    return options
