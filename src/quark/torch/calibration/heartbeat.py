"""Who is alive among the processes of a group, and what ended those that are not.

Each process writes a number that grows into the store that torchrun keeps, `BEAT` seconds apart, and reads those of the
others. One whose number stands still for `SILENCE` seconds is lost: killed, or its machine is gone. One that ends with
an error leaves its words there, so that the others can repeat them.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

BEAT, SILENCE = 0.5, 5.0
"""Seconds between two beats, and without one until a process is taken for lost after a collective operation failed."""
_STALLED = 30.0
"""Seconds without a beat that count while all else goes well: a machine may be suspended or swap for a while."""


class Heartbeat:
    """The beats of this process, and what is heard of the others.

    Args:
        rank, world: Of this process and its group.
        timeout: Seconds after which the store is given up.
    """

    def __init__(self, rank: int, world: int, timeout: float) -> None:
        self.rank, self.world = rank, world
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A connection of its own: what waits on another one does not hold up the beats.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=min(timeout, 30))
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = dist.PrefixStore(f"quark/{attempt}", store)  # type: ignore[attr-defined]
        self.store.set(f"name-{rank}", f"process {os.getpid()} on {socket.gethostname()}")
        self._beats = [f"beat-{other}" for other in range(world)]
        self._heard = {other: (b"", time.monotonic()) for other in range(world)}
        self.names = [f"rank {other}" for other in range(world)]
        self._store_lost: float | None = None
        self._stop = threading.Event()
        self.store.set(self._beats[rank], "0")
        self._thread = threading.Thread(target=self._run, daemon=True, name="quark-heartbeat")

    def start(self) -> None:
        """Begin to beat and to listen; when all processes have made theirs."""
        names = self.store.multi_get([f"name-{other}" for other in range(self.world)])
        self.names = [f"rank {other} ({name.decode()})" for other, name in enumerate(names)]
        now = time.monotonic()
        self._heard = dict.fromkeys(range(self.world), (b"", now))
        self._thread.start()

    def stop(self, error: str | None) -> None:
        """End it, with what the others are to know: the error that ends this process, if one does."""
        self._stop.set()
        with suppress(RuntimeError):
            if error is not None:
                self.store.set(f"error-{self.rank}", error)
        if self._thread.is_alive():
            self._thread.join(2 * BEAT)

    def _run(self) -> None:
        count = 0
        while not self._stop.wait(BEAT):
            count += 1
            try:
                self.store.set(self._beats[self.rank], str(count))
                found = self.store.multi_get(self._beats)
            except RuntimeError:  # the store went with the process or the agent that kept it
                self._store_lost = self._store_lost or time.monotonic()
                continue
            self._store_lost = None
            now = time.monotonic()
            for other, beat in enumerate(found):
                if beat != self._heard[other][0]:
                    self._heard[other] = (beat, now)

    def lost(self, silence: float = _STALLED) -> list[int]:
        """The ranks that have been silent for so many seconds; rank 0 where the store is gone, which it keeps."""
        now = time.monotonic()
        if self._store_lost is not None and now - self._store_lost > min(silence, 4 * BEAT):
            return [0] if self.rank else []
        return [other for other, (_, when) in self._heard.items() if other != self.rank and now - when > silence]

    def reason(self) -> str:
        """Which process ended, and by what; waits until one is silent for `SILENCE` seconds, or has left its words."""
        until = time.monotonic() + SILENCE + 4 * BEAT
        while time.monotonic() < until:
            words = self._words()
            if words:
                return words
            lost = self.lost(SILENCE)
            if lost:
                return f"{', '.join(self.names[other] for other in lost)} died or can no longer be reached"
            time.sleep(BEAT / 2)
        return "all processes are alive, but one did not come to the place where they meet in time"

    def _words(self) -> str | None:
        """The error that another process left, but for those that only repeat one."""
        with suppress(RuntimeError):
            for other in range(self.world):
                if other != self.rank and self.store.check([f"error-{other}"]):
                    return f"{self.names[other]} failed: {self.store.get(f'error-{other}').decode()}"
        return None
