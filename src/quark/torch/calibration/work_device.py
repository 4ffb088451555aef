"""Where a block computes, and where its batches wait: on a GPU, in pinned host memory, but for a bounded part.

    on the GPU at once:   a block, what its solver needs, ON_DEVICE bytes of batches that wait, the batch that runs

Copies are queued on the stream of the GPU in the order of all that is done there: Python waits for none, and each finds
the values that it is to carry. Before the host reads what came from a GPU, `settle` waits for all of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from quark.torch.calibration.spill import SpillFile, Waiting
from quark.torch.model.batches import pinned, to_device, to_host
from quark.torch.model.blocks import Call

ON_DEVICE = 1 << 30
"""Bytes, at most, of what batches that wait have on a GPU: what is more waits on the host."""
COPIES = 6
"""How often hidden states may be there at once: what a block reads and what it gives, in three series of blocks."""
LEAST = 1 << 12
"""Bytes below which a tensor stays on a GPU: a few for each batch."""
MUCH = 1 << 22
"""Bytes of inputs of a block from which on a CPU spills its halted batches, which hold many times as much: those of a
wide MLP that wait for its last layer, with what the allocator keeps beside them, about 15 times."""


@dataclass(frozen=True)
class WorkDevice:
    """Where a block computes, and where its batches wait.

    Attributes:
        device: Where it computes; None: where its tensors are.
        room: Bytes that batches which halt within the block may have on a GPU.
        on_host: Whether what batches have between two forwards waits on the host of a GPU.
    """

    device: torch.device | None = None
    room: int = 0
    on_host: bool = False

    @classmethod
    def of(cls, device: torch.device, size: int) -> WorkDevice:
        """The place of a block on a device whose calls take so many bytes."""
        between = COPIES * size if device.type == "cuda" else 0
        on_host = between > ON_DEVICE
        return cls(device, ON_DEVICE - (0 if on_host else between), on_host)

    def waiting(self, x: Any) -> Any:
        """A tensor where it waits for a forward; anything else as it is."""
        if not self.on_host or not isinstance(x, torch.Tensor):
            return self.loaded(x)
        return pinned(x) if x.device.type == "cpu" else to_host(x)

    def loaded(self, x: Any) -> Any:
        """A tensor where the block computes; anything else as it is."""
        return x if self.device is None else to_device(x, self.device)

    def calls(self, calls: Iterable[Call]) -> list[Call]:
        """Calls whose tensors wait; what they share stays shared."""
        moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def once(x: torch.Tensor) -> torch.Tensor:
            if id(x) not in moved:
                moved[id(x)] = x, self.waiting(x)
            return moved[id(x)][1]

        return [call.with_tensors(once, self.device if self.on_host else None) for call in calls]

    def halted(self, own: Iterable[torch.Tensor], calls: Sequence[Call]) -> Waiting:
        """Where batches that halt leave what they hold.

        Args:
            own: Tensors that never move: those of the model.
            calls: Of all batches.
        """
        kind = "cpu" if self.device is None else self.device.type
        if kind == "cuda":
            return Offload([*own, *_distinct(calls)], self)
        if kind != "cpu" or bytes_of(calls) < MUCH:
            return Waiting()
        return SpillFile([*own, *_distinct(calls)])


WHERE_IT_IS = WorkDevice()


@dataclass
class Halt:
    """The tensors that a batch holds while it halts.

    Attributes:
        tensors: Storage -> a tensor that lies there, of those that may move.
        moved: Storage -> its bytes on the host.
        kept: Bytes that stay on the device.
    """

    tensors: dict[int, torch.Tensor]
    moved: dict[int, torch.Tensor] = field(default_factory=dict)
    kept: int = 0


class Offload(Waiting):
    """Pinned memory. The memory of a tensor on the device is freed, and given back to all that lies in it.

    There is no memory to read in between: CUDA would end the process. So what two batches hold both (a table of
    positions that a module keeps) never moves: of two that halt one after the other, the first is moved when it is
    known what the second holds.

    Args:
        own: Tensors that never move: those of the model, and what several batches are called with.
        place: Where the block computes.
    """

    def __init__(self, own: Iterable[torch.Tensor], place: WorkDevice) -> None:
        self.place, self._resident = place, 0
        self._own = {_storage_of(x): x for x in own}
        self._last: Halt | None = None
        self._moved: dict[int, torch.Tensor] = {}
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def spill(self, tensors: Iterable[torch.Tensor]) -> list[Halt]:
        halt, last = Halt({_storage_of(x): x for x in tensors if _may_move(x)}), self._last
        if last is not None:
            self._own |= {storage: x for storage, x in last.tensors.items() if storage in halt.tensors}
            self._move(last)
        self._last = halt
        return [halt]

    def bring_back(self, spilled: Halt) -> None:
        if spilled is self._last:
            self._last = None
        self._resident -= spilled.kept
        for storage, buffer in spilled.moved.items():
            x = spilled.tensors[storage]
            x.untyped_storage().resize_(len(buffer))
            _whole(x).copy_(buffer.view(x.dtype), non_blocking=True)
            del self._moved[storage]
            self._free[len(buffer)].append(buffer)

    def load(self, x: torch.Tensor) -> torch.Tensor:
        buffer = self._moved.get(_storage_of(x))
        if buffer is None:
            return self.place.loaded(x)
        # One piece of the buffer: to pick elements out of it, the host would have to wait for them.
        start = x.storage_offset()
        reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
        piece = buffer.view(x.dtype)[start : start + (reach if x.numel() else 0)]
        return self.place.loaded(piece).as_strided(x.shape, x.stride())

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return to_host(x) if self._moved else x

    def _move(self, halt: Halt) -> None:
        """Move what a batch holds to the host, if it has no room on the device."""
        movable = {storage: x for storage, x in halt.tensors.items() if storage not in self._own}
        size = sum(x.untyped_storage().nbytes() for x in movable.values())
        if self._resident + size <= self.place.room:
            halt.kept = size
            self._resident += size
            return
        for storage, x in movable.items():
            memory = x.untyped_storage()
            free = self._free[memory.nbytes()]
            buffer = free.pop() if free else torch.empty(memory.nbytes(), dtype=torch.uint8, pin_memory=True)
            buffer.view(x.dtype).copy_(_whole(x), non_blocking=True)
            memory.resize_(0)
            halt.moved[storage] = self._moved[storage] = buffer


class Recorded:
    """Tensors of calls while they are recorded: on the device where they are, as many as may wait there.

    Args:
        device: Where blocks will run; None: where the tensors are.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device, self._bytes = device, 0

    def __call__(self, call: Call, kept: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Call:
        """The call as it waits.

        Args:
            call: As it was recorded.
            kept: id of a tensor of the same batch -> that tensor, and what is kept of it.
        """
        pins = self.device is not None and self.device.type == "cuda"
        if not pins and call.hidden.device.type != "cuda":
            return call

        def keep(x: torch.Tensor) -> torch.Tensor:
            if id(x) not in kept:
                if x.device.type == "cpu":
                    kept[id(x)] = x, pinned(x) if pins else x
                else:
                    self._bytes += x.nbytes
                    full = x.device.type == "cuda" and COPIES * self._bytes > ON_DEVICE
                    kept[id(x)] = x, to_host(x) if full else x
            return kept[id(x)][1]

        return call.with_tensors(keep)


def settle(device: torch.device | None = None) -> None:
    """Wait until what came from GPUs has come to the host.

    Args:
        device: The only one from which something came; None: any.
    """
    if device is not None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    for index in range(torch.cuda.device_count()) if begun else ():
        torch.cuda.synchronize(index)


def bytes_of(calls: Iterable[Call]) -> int:
    """Bytes of the tensors of calls."""
    return sum(x.nbytes for x in _distinct(calls))


def _distinct(calls: Iterable[Call]) -> list[torch.Tensor]:
    """The tensors of calls, each once."""
    leaves = (leaf for call in calls for leaf in tree_leaves((call.args, dict(call.kwargs))))
    return [*{id(x): x for x in leaves if isinstance(x, torch.Tensor)}.values()]


def _storage_of(x: torch.Tensor) -> int:
    """Tells the storages of tensors that are alive apart."""
    return int(x.untyped_storage()._cdata)


def _may_move(x: torch.Tensor) -> bool:
    """Return True where a tensor lies in plain memory of a GPU, and in enough of it."""
    if x.device.type != "cuda" or x.layout is not torch.strided or x.requires_grad:
        return False
    memory = x.untyped_storage()
    return memory.nbytes() >= LEAST and memory.nbytes() % x.element_size() == 0 and memory.data_ptr() != 0


def _whole(x: torch.Tensor) -> torch.Tensor:
    """All of the memory in which a tensor lies, as elements of its type."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
