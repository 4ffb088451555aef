"""Calibration data that can be read more than once, and arrays that wait in memory or on disk."""

from __future__ import annotations

import copy
import math
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from quark.base.files import scratch_folder
from quark.core.array import NumpyArray
from quark.errors import CalibrationError
from quark.onnx.calibration.data.inputs import Feed, Input
from quark.onnx.calibration.data.readers import TimeUpError, samples, usable

MEMORY = 1 << 30
"""Bytes of samples or activations that stay in memory; more goes to a temporary folder."""


_IN_MEMORY: list[object] = []
"""One entry for each block that is `all_in_memory`; of the whole process, as stores are made in threads too."""


@contextmanager
def all_in_memory() -> Iterator[None]:
    """Within: no store that is made writes to the disk, whatever its bound."""
    _IN_MEMORY.append(None)
    try:
        yield
    finally:
        _IN_MEMORY.pop()


class Store:
    """Arrays by key: in memory up to a bound, beyond it in files of a temporary folder, which goes with the store.

    Args:
        memory: Bytes that stay in memory.
        folder: Where to make the temporary folder; None for the system's.
    """

    def __init__(self, memory: int = MEMORY, folder: str | None = None) -> None:
        self._memory, self._parent = sys.maxsize if _IN_MEMORY else memory, folder
        self._arrays: dict[Any, NumpyArray | Path] = {}
        self._used, self._count = 0, 0
        self._folder: Path | None = None

    def __contains__(self, key: Any) -> bool:
        return key in self._arrays

    def __getitem__(self, key: Any) -> NumpyArray:
        stored = self._arrays[key]
        return np.load(stored, mmap_mode="r") if isinstance(stored, Path) else stored

    def __setitem__(self, key: Any, array: NumpyArray) -> None:
        self.pop(key)
        if self._used + array.nbytes <= self._memory:
            self._used += array.nbytes
            self._arrays[key] = array
            return
        if self._folder is None:
            stack = ExitStack()
            self._folder = stack.enter_context(scratch_folder(Path(self._parent or tempfile.gettempdir())))
            # On Windows a file that is still mapped stays.
            weakref.finalize(self, stack.close)
        self._count += 1
        file = self._folder / f"{self._count}.npy"
        np.save(file, array, allow_pickle=False)
        self._arrays[key] = file

    def pop(self, key: Any) -> None:
        """Forget an array, if it is there."""
        stored = self._arrays.pop(key, None)
        if isinstance(stored, Path):
            stored.unlink(missing_ok=True)
        elif stored is not None:
            self._used -= stored.nbytes


class Samples:
    """The samples of a reader, as often as they are asked for; each is read once, and kept.

    Args:
        reader: Anything with `get_next()`, or an iterable of samples.
        inputs: Of the model: each sample is checked against them.
        limit: Most samples; None for all.
        memory: Bytes of samples that stay in memory.

    Attributes:
        until: The time after which whoever reads a sample gets TimeUpError.
        clock: What tells the time.
    """

    def __init__(
        self, reader: Any, inputs: Mapping[str, Input], limit: int | None = None, memory: int = MEMORY
    ) -> None:
        self._source = usable(samples(reader, dict(inputs), limit))
        self._store = Store(memory)
        self._entries: list[tuple[int, list[str]]] = []
        self.until, self.clock = math.inf, time.monotonic

    def __iter__(self) -> Iterator[Feed]:
        position = 0
        while position < len(self._entries) or self._read_next():
            yield self[position]
            position += 1

    def __getitem__(self, position: int) -> Feed:
        self.check_time()
        key, names = self._entries[position]
        return {name: np.asarray(self._store[key, name]) for name in names}

    def __len__(self) -> int:
        """How many samples there are; reads them all."""
        while self._read_next():
            pass
        return len(self._entries)

    def part(self, positions: Sequence[int]) -> Samples:
        """Some of the samples; they are kept once for both."""
        len(self)
        chosen = copy.copy(self)
        chosen._entries = [self._entries[position] for position in positions]
        return chosen

    def followed_by(self, other: Samples) -> Samples:
        """These samples, then those of another part of the same whole."""
        chosen = copy.copy(self)
        chosen._entries = [*self._entries, *other._entries]
        return chosen

    def check_time(self) -> None:
        """Raise TimeUpError after `until`."""
        if self.clock() > self.until:
            raise TimeUpError

    def _read_next(self) -> bool:
        feed = next(self._source, None)
        if feed is None:
            return False
        for name, array in feed.items():
            # A reader may use the memory of a sample again.
            self._store[len(self._entries), name] = array.copy()
        self._entries.append((len(self._entries), list(feed)))
        return True


def required(data: Samples | None, who: Any) -> Samples:
    """The data. Raises CalibrationError where there is none, or no sample in it."""
    if data is None or not len(data):
        raise CalibrationError(
            f"{type(who).__name__} needs calibration data, and there is {'none' if data is None else 'no sample'}. "
            "Possible: pass a calibration_data_reader (--calib on the command line)."
        )
    return data
