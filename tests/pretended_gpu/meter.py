"""What a program asks of the device: launches, waits, bytes across, bytes alive; and which line of quark asked."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.pretended_gpu.copies import Copies

VIEWS = frozenset({
    "view", "_unsafe_view", "t", "transpose", "permute", "slice", "select", "expand", "unsqueeze", "squeeze",
    "as_strided", "detach", "alias", "split", "unbind", "_reshape_alias", "unfold", "diagonal", "split_with_sizes",
    "lift_fresh", "view_as_real", "view_as_complex", "real", "imag", "narrow", "swapaxes", "movedim", "empty",
    "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_index_put_views", "set_", "resize_",
    "numpy_T", "chunk", "unflatten", "expand_as", "view_as", "mT", "mH", "adjoint",
})  # fmt: skip
"""Operators that start no kernel: they look at memory that is there, or ask for some."""

WAITS = frozenset({
    "_local_scalar_dense", "nonzero", "nonzero_numpy", "nonzero_static", "_unique2", "unique_dim",
    "unique_consecutive", "_unique", "masked_select", "equal", "is_nonzero", "bincount", "_linalg_check_errors",
    "histc", "_linalg_svd", "_linalg_eigh", "linalg_eig",
})  # fmt: skip
"""Operators after which Python knows something of the values, or of their number: the CPU waits until all is done."""


class Life:
    """Memory of the device: as long as a tensor that lies in it."""

    __slots__ = ("__weakref__", "index", "nbytes")

    def __init__(self, index: int, nbytes: int) -> None:
        self.index, self.nbytes = index, 0
        if _alive[index] + nbytes > bound.get(index, 1 << 62):
            asked = f"Tried to allocate {nbytes / 2**20:.2f} MiB. GPU {index} has {bound[index] / 2**20:.2f} MiB"
            raise torch.OutOfMemoryError(f"CUDA out of memory. {asked}.")
        self.nbytes = nbytes
        _alive[index] += nbytes
        _peak[index] = max(_peak[index], _alive[index])

    def resize(self, nbytes: int) -> None:
        """The memory is another size now."""
        _alive[self.index] += nbytes - self.nbytes
        self.nbytes = nbytes
        _peak[self.index] = max(_peak[self.index], _alive[self.index])

    def __del__(self) -> None:
        _alive[self.index] -= self.nbytes


bound: dict[int, int] = {}
"""Device -> bytes, beyond which it is full; without an entry all fits."""
_alive: Counter[int] = Counter()
_peak: Counter[int] = Counter()
lives: weakref.WeakValueDictionary[tuple[int, int], Life] = weakref.WeakValueDictionary()


def life_of(data: torch.Tensor, index: int) -> Life:
    """The memory that the host tensor behind a device tensor lies in."""
    storage = data.untyped_storage()
    life = lives.get((storage._cdata, index))
    if life is None:
        life = lives[storage._cdata, index] = Life(index, storage.nbytes())
    return life


_pinned: dict[int, StorageWeakRef] = {}
"""Memory of the host that the device copies by itself."""


def pin(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the host, from now on in pinned memory."""
    for key in [key for key, storage in _pinned.items() if storage.expired()]:
        del _pinned[key]
    _pinned[x.untyped_storage()._cdata] = StorageWeakRef(x.untyped_storage())
    return x


def is_pinned(x: torch.Tensor) -> bool:
    """Whether a tensor of the host lies in pinned memory."""
    storage = _pinned.get(x.untyped_storage()._cdata)
    return storage is not None and not storage.expired()


class Meter:
    """Counters of one pretended GPU.

    Attributes:
        launches: Name of an operator that starts a kernel -> how often it ran.
        waits: Name of what made the CPU wait for the device -> how often.
        uploads: The same of tensors that came from the host and waited: all that do not say `non_blocking`, and all
            that do not lie in pinned memory.
        queued: The same of tensors that went from the host to the device or back, and nobody waited.
        bytes_across: That went from the host to the device, or back.
        copies: Those that are not done.
        waited_at, uploaded_at: "file:line name", of the innermost line of quark -> how often.
    """

    def __init__(self, where: bool = True) -> None:
        self.where, self.copies = where, Copies()
        self.reset()

    def reset(self) -> None:
        """Begin to count anew; the peak of the memory is what is alive now."""
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self.queued: Counter[str] = Counter()
        self.waited_at: Counter[str] = Counter()
        self.uploaded_at: Counter[str] = Counter()
        self.bytes_across = 0
        _peak.clear()
        _peak.update(_alive)

    @contextmanager
    def counting(self) -> Iterator[Meter]:
        """Within: from 0."""
        self.reset()
        yield self

    def launch(self, name: str) -> None:
        if name in VIEWS or name.rstrip("_") in VIEWS:
            return
        self.launches[name] += 1

    def wait(self, name: str, nbytes: int = 0, index: int | None = None, until: int | None = None) -> None:
        """The host waits for a device, or for all of them; see `Copies.settle`."""
        self.copies.settle(index, until)
        self.waits[name] += 1
        self.bytes_across += nbytes
        if self.where:
            self.waited_at[f"{line_of_quark()} {name}"] += 1

    def upload(self, name: str, nbytes: int) -> None:
        self.uploads[name] += 1
        self.bytes_across += nbytes
        if self.where:
            self.uploaded_at[f"{line_of_quark()} {name}"] += 1

    def queue(self, name: str, nbytes: int) -> None:
        self.queued[name] += 1
        self.bytes_across += nbytes

    @staticmethod
    def alive(index: int = 0) -> int:
        """Bytes of tensors on a device."""
        return _alive[index]

    @staticmethod
    def peak(index: int = 0) -> int:
        """The most bytes that were alive at once since the last reset."""
        return _peak[index]

    def __str__(self) -> str:
        return (
            f"{self.launches.total()} launches, {self.waits.total()} waits, {self.uploads.total()} uploads, "
            f"{self.bytes_across} bytes across, {self.peak()} bytes at most"
        )


def line_of_quark() -> str:
    """The innermost line of quark that is running: "core/solvers/gptq.py:296"."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        _, found, path = frame.f_code.co_filename.rpartition("/src/quark/")
        if found:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
