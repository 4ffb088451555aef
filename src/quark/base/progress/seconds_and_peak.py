"""Time and memory, as they are measured and as they are said."""

from __future__ import annotations

import sys
import time


def seconds_now() -> float:
    """A clock that only goes forward, in seconds."""
    return time.monotonic()


def seconds_text(seconds: float) -> str:
    """A time as it is said: "0.31 s", "4.2 s", "12 s", "5 min", "2 h 10 min"."""
    if seconds < 99.5:
        return f"{seconds:.{2 if seconds < 0.995 else 1 if seconds < 9.95 else 0}f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def peak_mb() -> float | None:
    """The most memory that this process has had at once, in millions of bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 1e6 if sys.platform == "darwin" else most * 1024 / 1e6


def peak_text() -> str:
    """Return the end of a line: ", peak 1.23 GB"; "" where the system tells no peak."""
    peak = peak_mb()
    return "" if peak is None else f", peak {peak / 1000:.2f} GB"
