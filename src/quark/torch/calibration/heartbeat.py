"""Who is alive among the processes of a group, and what ended those that are not.

Each process writes a number that grows into the store that they share, `BEAT` seconds apart, and reads those of the
others. One whose number stands still for `SILENCE` seconds is lost: killed, or its machine is gone. One that ends with
an error leaves its words there, so that the others can repeat them.

Beside it stands how often the process came to where all exchange something. So one that waits there knows for whom.
Last comes whether it has heard of an end: the store ends with the process that keeps it, which waits for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from quark.base.progress import seconds_text
from quark.torch.calibration.rendezvous import OPTION, LongWait, Rendezvous

BEAT, SILENCE = 0.5, 5.0
"""Seconds between two beats, and without one until a process is taken for lost after a collective operation failed."""
_STALLED = 30.0
"""Seconds without a beat that count while all else goes well: a machine may be suspended or swap for a while."""

_SILENT = "died or can no longer be reached"


class Heartbeat:
    """The beats of this process, and what is heard of the others.

    Args:
        meeting: Where the group came together.

    Attributes:
        overdue: What the others are to know, where this one has waited for too long.
    """

    def __init__(self, meeting: Rendezvous) -> None:
        self.rank, self.world, self.timeout = meeting.rank, meeting.world, meeting.timeout
        self.store, self._keeps = meeting.connection(), meeting.keeps
        self.names = [f"rank {other} ({name})" for other, name in enumerate(meeting.names)]
        self._beats = [f"beat-{other}" for other in range(self.world)]
        self._ends = [f"end-{other}" for other in range(self.world)]
        self._ended = [""] * self.world
        self._met, self._came = 0, [0] * self.world
        self._waiting: LongWait | None = None
        self._store_lost: float | None = None
        self.overdue: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="quark-heartbeat")

    def start(self) -> None:
        """Begin to beat and to listen; when all processes have come."""
        self.store.set(self._ends[self.rank], "")
        self.store.set(self._beats[self.rank], "0 0 0")
        self.store.wait(self._beats)
        now = time.monotonic()
        self._heard = dict.fromkeys(range(self.world), (b"", now))
        self._thread.start()

    @contextmanager
    def waiting(self) -> Iterator[LongWait]:
        """Within: this process is where all exchange something."""
        self._met += 1
        self._waiting = LongWait(self.rank, time.monotonic())
        try:
            yield self._waiting
        finally:
            self._waiting = None

    def stop(self, error: str | None) -> None:
        """End it, with what the others are to know: the error that ends this process, if one does."""
        with suppress(RuntimeError):
            if error is not None:
                self._tell(self.rank, f"failed: {error}")
            if self._keeps and any(self._ended):
                self._await_hearers()
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * BEAT)
        with suppress(RuntimeError):  # nobody need wait for this one any more
            self.store.set(self._beats[self.rank], f"0 {self._met} 1")

    def _tell(self, rank: int, how: str) -> None:
        """Leave how a process ended, for the others to repeat."""
        self._ended[rank] = how
        self.store.set(self._ends[rank], how)

    def _await_hearers(self) -> None:
        """Wait until each process that lives has heard how one ended, or for `SILENCE` seconds."""
        until = time.monotonic() + SILENCE
        while time.monotonic() < until and self._thread.is_alive():
            over = {self.rank, *self.lost(4 * BEAT), *(rank for rank, how in enumerate(self._ended) if how)}
            beats = self.store.multi_get(self._beats)
            if all(beat.endswith(b" 1") for rank, beat in enumerate(beats) if rank not in over):
                return
            time.sleep(BEAT / 5)

    def _run(self) -> None:
        count = 0
        while not self._stop.wait(BEAT):
            count += 1
            try:
                self.store.set(self._beats[self.rank], f"{count} {self._met} {int(any(self._ended))}")
                found = self.store.multi_get(self._beats)
                self._hear()
            except RuntimeError:  # the store went with the process or the agent that kept it
                self._store_lost = self._store_lost or time.monotonic()
                continue
            self._store_lost = None
            now = time.monotonic()
            for other, beat in enumerate(found):
                if beat != self._heard[other][0]:
                    self._heard[other] = (beat, now)
                    self._came[other] = int(beat.split()[1])
            waiting, absent = self._waiting, self._absent()
            if waiting is not None and absent and self.rank == min({*range(self.world)} - {*absent}):
                waiting.say(self._state_of(absent), self.timeout)

    def _hear(self) -> None:
        for other, how in enumerate(self.store.multi_get(self._ends)):
            self._ended[other] = how.decode() or self._ended[other]

    def _absent(self) -> list[int]:
        """The ranks that have not come to where this one is."""
        return [other for other, came in enumerate(self._came) if other != self.rank and came < self._met]

    def _state_of(self, ranks: list[int]) -> str:
        silent = self.lost(SILENCE)
        words = (f"{self.names[each]}, which is {'silent' if each in silent else 'alive'}" for each in ranks)
        return " and ".join(words)

    def lost(self, silence: float = _STALLED) -> list[int]:
        """The ranks that have been silent for so many seconds; rank 0 where the store is gone, which it keeps."""
        now = time.monotonic()
        if self._store_lost is not None and now - self._store_lost > min(silence, 4 * BEAT):
            return [0] if self.rank else []
        return [other for other, (_, when) in self._heard.items() if other != self.rank and now - when > silence]

    def reason(self, waited: float = 0.0) -> str:
        """Which process ended, and by what; waits until one is silent for `SILENCE` seconds, or has left its words.

        Args:
            waited: Seconds for which this process has waited for the others.
        """
        until = time.monotonic() + SILENCE + 4 * BEAT
        while time.monotonic() < until:
            with suppress(RuntimeError):
                self._hear()
            for other, how in enumerate(self._ended):
                if how and other != self.rank:
                    return f"{self.names[other]} {how}"
            lost = self.lost(SILENCE)
            if lost:
                with suppress(RuntimeError):
                    for other in lost:
                        self._tell(other, _SILENT)
                return f"{', '.join(self.names[other] for other in lost)} {_SILENT}"
            if waited >= 0.95 * self.timeout:
                absent = self._absent()
                whom = self._state_of(absent) if absent else "the others, which came, but nothing comes from them"
                self.overdue = f"it has waited {seconds_text(waited)} for {whom}"
                return f"{self.overdue}. Possible: look what that process does; or more time ({OPTION})"
            time.sleep(BEAT / 2)
        return "all processes are alive, but nothing comes from one of them"
