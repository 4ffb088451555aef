"""Copies between host and device that nobody waits for: done when somebody does, and not before.

    to the host       what it is to hold is NaN until then; in integers, the bits of the values inverted
    to the device     pinned memory that it comes from must not change until then: PinnedMemoryChanged

Each device does what it is told in the order in which it is told. So a copy to pinned memory and one from it, to the
same device, need no wait in between; and a copy between two devices is done when either is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


class PinnedMemoryChanged(RuntimeError):
    """The host wrote into pinned memory from which a device was still to copy."""


@dataclass(eq=False)
class _Copy:
    """A copy that is not done, as far as the host knows.

    Attributes:
        host: The tensor of the host, from which or to which it goes; kept alive, as CUDA's allocator does.
        values: What it carries to the host; or what the host sees in the memory that it must leave alone.
        to_host: Its direction.
        devices: Any of which has to be waited for.
        number: Its place in the order of all.
        place: The line that asked for it.
    """

    host: torch.Tensor
    values: torch.Tensor
    to_host: bool
    devices: set[int]
    number: int
    place: str
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = self.host.data_ptr()

    def is_there(self) -> bool:
        """Whether the memory of the host is still what it was; else the program has given it back."""
        return self.host.data_ptr() == self.address and self.host.untyped_storage().nbytes() > 0

    def look(self) -> None:
        """Raise an error where memory that was to be left alone was not."""
        if not self.to_host and self.is_there() and not _same_bits(self.host, self.values):
            raise PinnedMemoryChanged(
                f"Pinned memory was written to before the device had copied from it, as {self.place} had told it to, "
                "without a wait."
            )


class Copies:
    """All copies that are not done."""

    def __init__(self) -> None:
        self._open: list[_Copy] = []
        self._count = 0
        self._lock = threading.RLock()  # threads share a device

    @property
    def number(self) -> int:
        """Of the copy that was asked for last."""
        return self._count

    def to_host(self, host: torch.Tensor, index: int, place: str) -> None:
        """The host tensor has the values; it shall have them when the device is waited for."""
        self._add(host, index, place, to_host=True)
        _spoil(host)

    def before_to_host(self, host: torch.Tensor) -> None:
        """Memory is about to be written by a device: what went from there before is looked at now."""
        with self._lock:
            earlier = [copy for copy in self._of(host) if not copy.to_host]
            self._finish(earlier)

    def from_host(self, source: torch.Tensor, index: int, place: str, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of a copy from pinned memory, in which values that are still to come count as there.

        Args:
            source: Of the host.
            index: Of the device.
            place: The line that asks.
            run: Copies.
        """
        with self._lock:
            coming = [copy for copy in self._of(source) if copy.to_host and index in copy.devices and copy.is_there()]
            for copy in coming:
                copy.host.copy_(copy.values)
            made = run()
            for copy in coming:
                _spoil(copy.host)
            self._add(source, index, place, to_host=False)
            return made

    def between(self, first: int, second: int) -> None:
        """A copy between two devices makes each wait for what the other was told before."""
        with self._lock:
            for copy in self._open:
                if copy.devices & {first, second}:
                    copy.devices |= {first, second}

    def settle(self, index: int | None = None, until: int | None = None) -> None:
        """A device is waited for.

        Args:
            index: Of the device; None: all are.
            until: Copies with this number and smaller ones alone are done; None: all.
        """
        with self._lock:
            self._finish([
                copy for copy in self._open
                if (index is None or index in copy.devices) and (until is None or copy.number <= until)
            ])  # fmt: skip

    def end(self) -> None:
        """The device goes: what was never waited for stays NaN, and what was sent is looked at for the last time."""
        with self._lock:
            left, self._open = self._open, []
            for copy in left:
                copy.look()

    def _add(self, host: torch.Tensor, index: int, place: str, to_host: bool) -> None:
        with self._lock:
            self._count += 1
            host = host.data  # which counts for itself how often it is written to, as autograd does not see a device do
            self._open.append(_Copy(host, host.clone(), to_host, {index}, self._count, place))

    def _of(self, host: torch.Tensor) -> list[_Copy]:
        """Copies from or to memory in which a tensor lies."""
        storage = host.untyped_storage()._cdata
        return [copy for copy in self._open if copy.host.untyped_storage()._cdata == storage]

    def _finish(self, copies: list[_Copy]) -> None:
        for copy in copies:
            self._open.remove(copy)
            copy.look()
            if copy.to_host and copy.is_there():
                later = [other for other in self._of(copy.host) if not other.to_host]
                for other in later:
                    other.look()
                copy.host.copy_(copy.values)
                for other in later:  # the host sees something else there from now on
                    other.values = other.host.clone()


def _spoil(x: torch.Tensor) -> None:
    """Write what no program takes for values."""
    if x.is_floating_point() or x.is_complex():
        x.fill_(float("nan"))
    else:
        x.copy_(~x)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
