"""What `make gpu` prints: a row for each case, whatever becomes of it, and one table of them."""

from __future__ import annotations

import gc
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

HEADER = ("part", "case", "found", "bound", "")
LONGEST = 160
"""Characters of an error that are shown."""


@dataclass(frozen=True)
class Found:
    """What a case gave.

    Attributes:
        value: As the table shows it.
        bound: What it is held against, as the table shows it; empty for a figure that is only told.
        verdict: "equal", "within", "BEYOND", or what happened in a word or two.
    """

    value: str
    bound: str = ""
    verdict: str = ""


@dataclass
class Report:
    """The rows so far, and the clock that decides what is still begun.

    Attributes:
        device: What the cases run on beside the CPU.
        limit: Seconds in all.
        small: Whether sizes are those for a machine whose GPU is pretended.
        only: A case is run if its part and name hold one of these; every case where there are none.
        rows: Part, case, found, bound, verdict.
        skipped: How many cases `only` leaves out.
    """

    device: torch.device
    limit: float
    small: bool = False
    only: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    skipped: int = 0
    start: float = field(default_factory=time.perf_counter)

    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.start

    def run(self, part: str, case: str, action: Callable[[], Found], until: float = 1.0, needs: float = 5.0) -> None:
        """Run a case and note what it gave; its exceptions end it alone.

        Args:
            part, case: Its name.
            action: What is run.
            until: Share of the limit after which cases of this part are not begun.
            needs: Seconds that it may take: it is not begun with less.
        """
        if self.only and not any(name in f"{part}: {case}" for name in self.only):
            self.skipped += 1
            return
        if self.seconds() + needs > self.limit * until:
            self.note(part, case, Found("", verdict="not run: no time left"))
            return
        try:
            found = action()
        except Exception as error:  # noqa: BLE001 - whatever one case raises, the others are still to be seen
            found = Found(one_line(error), verdict="FAILS")
        self.note(part, case, found)
        gc.collect()
        torch.cuda.empty_cache()

    def note(self, part: str, case: str, found: Found) -> None:
        """Add a row, and print it at once: a run that is killed has told what it found."""
        self.rows.append((part, case, found.value, found.bound, found.verdict))
        sys.stderr.write(f"{self.seconds():6.1f} s  {part}: {case}: {found.value} {found.bound} {found.verdict}\n")

    def failed(self) -> int:
        """How many cases failed, or are beyond their bounds."""
        return sum(row[-1] in ("FAILS", "BEYOND") for row in self.rows)

    def table(self) -> str:
        """The rows as a table of markdown, and what was not run."""
        cells = [HEADER, tuple("---" for _ in HEADER), *self.rows]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
        late = sum(row[-1].startswith("not run") for row in self.rows)
        lines += ["", f"{len(self.rows)} cases in {self.seconds():.0f} s: {self.failed()} fail, {late} were not run."]
        if self.skipped:
            lines.append(f"{self.skipped} other cases were not run: --only leaves them out.")
        return "\n".join(lines)


def one_line(error: BaseException) -> str:
    """The kind of an exception and the first line of what it says."""
    said = re.sub(r"\s+", " ", (str(error).strip().splitlines() or [""])[0])
    return f"{type(error).__name__}: {said}"[:LONGEST]


def median_seconds(action: Callable[[], Any], repeats: int = 20, warm: int = 3) -> float:
    """Median time of an action, the device's work included."""
    return statistics.median([once(action) for _ in range(repeats + warm)][warm:])


def once(action: Callable[[], Any]) -> float:
    """Seconds of one run of it, from an idle device to an idle one."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start
