"""own_time: a clock that stands still while other programs have the processor.

    it moves by min(wall clock, processor seconds of all threads of this process)     since it was last read

So what a search comes to in a minute does not depend on what else the machine does.
"""

from __future__ import annotations

import time


class OwnClock:
    """Seconds, from 0."""

    def __init__(self) -> None:
        self._seconds, self._wall, self._own = 0.0, time.monotonic(), time.process_time()

    def __call__(self) -> float:
        """The time now."""
        wall, own = time.monotonic(), time.process_time()
        self._seconds += min(wall - self._wall, own - self._own)
        self._wall, self._own = wall, own
        return self._seconds


own_time = OwnClock()
"""The clock of this process."""
