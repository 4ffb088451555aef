"""Where the processes of a group come together: the store that they share, who is there, and which GPU each takes.

Nothing here waits without a word, or for longer than it is told: a process that comes late, or never, is named.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from quark.base.log import logger
from quark.base.progress import seconds_text
from quark.errors import ConfigError, ProcessLostError

FIRST_WORD = 10.0
"""Seconds after which a process that waits says so; after twice as long it says so again, and so on."""
OPTION = "--process-timeout, or timeout of quark.torch.processes"
_STEP = 0.1
"""Seconds between two looks for those that are awaited."""
_entered = 0
"""How often this process came to a rendezvous: all do so equally often, and each time has its own part of the store."""


class LongWait:
    """Says that this process waits, for whom and for how long: after `FIRST_WORD`, and ever less often.

    Args:
        rank: Of this process.
        begin: When it began to wait, on the monotonic clock.
    """

    def __init__(self, rank: int, begin: float) -> None:
        self.rank, self.begin, self._next = rank, begin, FIRST_WORD

    def say(self, whom: str, timeout: float) -> None:
        """Say it where it is time to.

        Args:
            whom: Those that are awaited.
            timeout: Seconds after which the wait ends with an error.
        """
        waited = time.monotonic() - self.begin
        if waited < self._next or waited >= timeout:  # whose error is next
            return
        while self._next <= waited:
            self._next *= 2
        text = f"Rank {self.rank} has waited {seconds_text(waited)} for {whom}, and gives up after {timeout:g} s."
        # Past the level of the logger: of several processes only the first logs, and this one may wait for it.
        logger.handle(logger.makeRecord(logger.name, 30, __file__, 0, text, (), None))


def ranks_text(ranks: Iterable[int]) -> str:
    """As "rank 1" or "ranks 1, 2"."""
    found = [*ranks]
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


class Rendezvous:
    """The store of the processes that torchrun started, in which each has said that it is here.

    Args:
        rank, world: Of this process, and how many there are.
        timeout: Seconds after which one that does not come is given up.

    Attributes:
        store: What the processes of this group write and read.
        names: "process 17 on host" of each.
        keeps: Whether the store is in this process, and ends with it.

    Raises:
        ProcessLostError: Processes did not come; names them.
    """

    def __init__(self, rank: int, world: int, timeout: float) -> None:
        global _entered
        _entered += 1
        self.rank, self.world, self.timeout = rank, world, timeout
        self._waiting = LongWait(rank, time.monotonic())
        self._address, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # torchrun keeps the store itself; elsewhere the first process does, as PyTorch's own rendezvous has it.
        self.keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        if not self.keeps:
            self._await_store()
        self._server = self._connected(self.keeps)
        self.store = self._part(self._server)
        self.store.set(f"name-{rank}", f"process {os.getpid()} on {socket.gethostname()}")
        self.store.set(f"card-{rank}", own_card())
        self._await_others()
        self.names = [name.decode() for name in self.store.multi_get([f"name-{each}" for each in range(world)])]

    def connection(self) -> Any:
        """The store of the group by another connection: what waits on the first one does not hold it up."""
        return self._part(self._connected(False))

    def cards(self) -> list[str]:
        """The GPU of each process, see `own_card`."""
        return [card.decode() for card in self.store.multi_get([f"card-{each}" for each in range(self.world)])]

    def _part(self, store: Any) -> Any:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"quark/{attempt}/{_entered}", store)  # type: ignore[attr-defined]

    def _connected(self, keeps: bool) -> Any:
        left = timedelta(seconds=max(1.0, min(self._left(), 30.0)))
        try:
            return dist.TCPStore(  # type: ignore[attr-defined]
                self._address, self._port, is_master=keeps, wait_for_workers=False, timeout=left, multi_tenant=True
            )
        except (RuntimeError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise ProcessLostError(
                f"Rank {self.rank} {'cannot open' if keeps else 'does not reach'} the place where the processes meet, "
                f"{self._address}:{self._port}: {first} Possible: another MASTER_PORT, on all machines."
            ) from error

    def _await_store(self) -> None:
        """Wait until somebody answers where the processes meet. PyTorch would log each try that fails."""
        place = f"{self._address}:{self._port}"
        while True:
            try:
                with closing(socket.create_connection((self._address, self._port), max(_STEP, min(self._left(), 5.0)))):
                    return
            except OSError as error:
                reason = error.strerror or str(error)
            if self._left() < 0:
                raise self._absent(f"rank 0, which does not answer at {place} ({reason})")
            if os.environ.get("LOCAL_RANK", "0") == "0":  # the others of this machine would say it too
                self._waiting.say(f"rank 0, which does not answer at {place} yet", self.timeout)
            time.sleep(_STEP)

    def _await_others(self) -> None:
        missing = [*range(self.world)]
        while True:
            try:  # a process says its card last
                missing = [each for each in missing if not self.store.check([f"card-{each}"])]
            except RuntimeError as error:
                raise self._absent("rank 0, which was here and is gone") from error
            if not missing:
                return
            if self._left() < 0:
                raise self._absent(ranks_text(missing))
            if self.rank == min({*range(self.world)} - {*missing}):  # one of those who wait for them
                self._waiting.say(f"{ranks_text(missing)} to start", self.timeout)
            time.sleep(_STEP)

    def _left(self) -> float:
        return self.timeout - (time.monotonic() - self._waiting.begin)

    def _absent(self, whom: str) -> ProcessLostError:
        waited = seconds_text(time.monotonic() - self._waiting.begin)
        return ProcessLostError(
            f"Rank {self.rank} has waited {waited} for {whom}: the group of {self.world} processes did not come "
            f"together. Possible: start all of them, with the same MASTER_ADDR and MASTER_PORT; look at the output of "
            f"those that did not come; or more time ({OPTION})."
        )


def own_index() -> int:
    """The number of this process's GPU: its own on its machine; the only one, where CUDA_VISIBLE_DEVICES shows one."""
    return int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()


def own_card() -> str:
    """The GPU of this process, in words that are those of each process that has the same; empty without one."""
    if not torch.cuda.is_available():
        return ""
    count, index = torch.cuda.device_count(), own_index()
    # Without an identity in hardware, the environment tells which the numbers stand for.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    identity = getattr(torch.cuda.get_device_properties(index), "uuid", f"{visible} {index}")
    return f"{socket.gethostname()} {identity} {count}"


def shared_card(cards: Sequence[str]) -> str | None:
    """Which processes have one GPU, in words; None where each has its own, or none.

    NCCL lets no two processes exchange anything from one GPU.

    Args:
        cards: Of each process, see `own_card`.
    """
    for card in filter(None, cards):
        ranks = [each for each, other in enumerate(cards) if other == card]
        if len(ranks) > 1:
            host, count = card.split()[0], int(card.split()[-1])
            there = sum(other.startswith(f"{host} ") for other in cards)
            return (
                f"{ranks_text(ranks)} would share one GPU, as there are {there} processes on {host} and {count} "
                f"GPU{'s' if count > 1 else ''}."
            )
    return None


def check_own_card(device: torch.device, own: int, shared: str | None) -> None:
    """Raise ConfigError for a GPU that is not this process's own.

    Args:
        device: Where it is to work.
        own: Number of its GPU.
        shared: What `shared_card` says.
    """
    if device.type != "cuda":
        return
    if shared is not None:
        raise ConfigError(
            f"{device}: {shared} Possible: as many processes as GPUs (torchrun --nproc-per-node), or the device cpu."
        )
    if device.index is not None and device.index != own:
        raise ConfigError(
            f"{device}: each of several processes works on its own GPU, this one on cuda:{own}. Possible: the device "
            "cuda, which is that one."
        )
