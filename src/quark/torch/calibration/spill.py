"""Tensors of halted batches lie in a file until they go on: one batch at a time is in memory, not all.

Only the bytes move: a tensor keeps its place in the forward that halts. While it is spilled it is a view of the file,
so that whoever reads it all the same finds its values. Those of a GPU: see `work_device.py`.
"""

from __future__ import annotations

import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch

from quark.base.memory_and_disk import give_back_memory

LEAST = 1 << 18
"""Bytes below which a tensor stays in memory."""
_GIVEN_BACK = 1 << 26
"""Bytes that moved after which the memory that they left is given back: each time would cost as much as moving."""


@dataclass(frozen=True)
class Slot:
    """A part of the file.

    Attributes:
        start: Where it begins.
        mapped: Its bytes, (size,) uint8.
    """

    start: int
    mapped: np.memmap[Any, Any]


@dataclass(frozen=True)
class Spilled:
    """Tensors that share their memory, and where its bytes are."""

    tensors: tuple[torch.Tensor, ...]
    place: Slot


class Waiting:
    """A place for the tensors of waiting batches that leaves them where they are."""

    def spill(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        """Move what a batch holds elsewhere; gives what `bring_back` takes, one after the other."""
        return []

    def bring_back(self, spilled: Any) -> None:
        """Move it to where the block computes again."""

    def load(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor where the block computes, with the values of x: x itself, unless it waits elsewhere."""
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Return an object in the place of a tensor that a batch holds, where it may wait."""
        return x


class SpillFile(Waiting):
    """A file without a name, which is gone with the process, however that ends.

    Args:
        own: Tensors that never move: those of the model, and what its blocks are called with.
    """

    def __init__(self, own: Iterable[torch.Tensor] = ()) -> None:
        self._own = {id(x): x for x in own}
        self._file: Any = None
        self._end = 0
        self._full = False
        self._left = 0
        self._free: dict[int, list[Slot]] = defaultdict(list)
        self._made: dict[int, int] = defaultdict(int)
        self._spilled: dict[int, Spilled] = {}

    def spill(self, tensors: Iterable[torch.Tensor]) -> list[Spilled]:
        """Move tensors to the file, with the tensors they are views of, as far as there is room on the disk.

        A tensor stays where its memory has holders that are not among these: it would not be freed, and what is written
        to one of them would not be in the others.
        """
        known = {id(x): x for one in tensors for x in (one, one._base) if x is not None}
        by_memory: dict[int, list[torch.Tensor]] = defaultdict(list)
        for x in known.values():
            if type(x) is torch.Tensor and x.device.type == "cpu" and not x.requires_grad:
                by_memory[x.untyped_storage().data_ptr()].append(x)
        moved = [self._moved(group) for group in by_memory.values() if self._may_move(group)]
        if self._left > _GIVEN_BACK:
            give_back_memory()
            self._left = 0
        return [spilled for spilled in moved if spilled is not None]

    def bring_back(self, spilled: Spilled) -> None:
        _point(spilled.tensors, self._read_bytes(spilled.place))
        for x in spilled.tensors:
            del self._spilled[id(x)]
        self._free[spilled.place.mapped.size].append(spilled.place)

    def load(self, x: torch.Tensor) -> torch.Tensor:
        spilled = self._spilled.get(id(x))
        return x if spilled is None else _view(x, self._read_bytes(spilled.place))

    def _may_move(self, group: list[torch.Tensor]) -> bool:
        storage = group[0].untyped_storage()
        if self._full or storage.nbytes() < LEAST or any(id(x) in self._own or id(x) in self._spilled for x in group):
            return False
        count: Callable[[Any], int] | None = getattr(torch._C, "_storage_Use_Count", None)
        # One more holder is the object `storage`. Without the count nothing is known of others.
        return count is not None and count(storage._cdata) == len(group) + 1

    def _moved(self, group: list[torch.Tensor]) -> Spilled | None:
        """Write the memory of tensors; None where there is no room."""
        storage = group[0].untyped_storage()
        size = storage.nbytes()
        content = torch.empty(0, dtype=torch.uint8).set_(storage)
        try:
            place = self._free[size].pop() if self._free[size] else self._new_slots(size)
            self._file.seek(place.start)
            left = content.numpy().data
            while left:
                left = left[self._file.write(left) :]
        except OSError:  # the disk is full: what is in memory stays there
            self._full = True
            return None
        _point(group, torch.from_numpy(place.mapped).untyped_storage())
        self._left += size
        spilled = Spilled(tuple(group), place)
        self._spilled.update((id(x), spilled) for x in group)
        return spilled

    def _read_bytes(self, place: Slot) -> torch.UntypedStorage:
        found = np.empty(place.mapped.size, np.uint8)
        self._file.seek(place.start)
        left = found.data
        while left:
            left = left[self._file.readinto(left) :]
        return torch.from_numpy(found).untyped_storage()

    def _new_slots(self, size: int) -> Slot:
        """Make slots of a size, as many as there are of it, since each mapping is an open file; one of them."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - open as long as this object
            weakref.finalize(self, self._file.close)
        count = max(self._made[size], 1)
        self._made[size] += count
        start, self._end = self._end, self._end + count * size
        self._file.truncate(self._end)
        mapped = np.memmap(self._file, np.uint8, "r+", start, (count, size))
        self._free[size] = [Slot(start + index * size, mapped[index]) for index in range(count)]
        return self._free[size].pop()


def tensors_of(frame: FrameType | None) -> list[torch.Tensor]:
    """The tensors that a frame and its callers have as local variables."""
    found: list[torch.Tensor] = []
    while frame is not None:
        for value in frame.f_locals.values():
            parts = value if isinstance(value, (tuple, list)) else value.values() if type(value) is dict else (value,)
            found += [x for x in parts if isinstance(x, torch.Tensor)]
        frame = frame.f_back
    return found


def _point(tensors: Iterable[torch.Tensor], storage: torch.UntypedStorage) -> None:
    """Let tensors have their values in other memory."""
    for x in tensors:
        x.data = _view(x, storage)


def _view(x: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor of the form of x with its values in other memory."""
    return torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.shape, x.stride())
