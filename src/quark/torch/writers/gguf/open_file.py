"""Opens GGUF files, also such as were damaged, or say that they hold more than they do."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from quark.errors import FormatError
from quark.torch.writers.gguf.names import import_gguf


def open_gguf(file: Path) -> Any:
    """A gguf.GGUFReader of the file. Raises FormatError for what is no GGUF file, or a truncated one."""
    import_gguf()  # raises where it is missing
    try:
        return _reader_class()(file)
    except (OSError, ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise FormatError(f"{file} is no GGUF file, or truncated: {error}.") from None


@cache
def _reader_class() -> Any:
    """gguf.GGUFReader, which stops at the end of the file.

    That of the package takes what lies behind the end for values of no bytes: an array that says that it has 2 ** 60
    entries would be read until the memory is full.
    """
    gguf = import_gguf()

    class Reader(gguf.GGUFReader):  # type: ignore[misc, name-defined]  # no types where the package is missing
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            values = super()._get(offset, dtype, count, override_order)
            if len(values) < count:
                raise ValueError(f"it ends at byte {len(self.data)}, before {count} values at byte {offset}")
            return values

    return Reader
