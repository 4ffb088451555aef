"""Progress of a long job: one mechanism for every loop, whatever it goes over.

    time left = size of the steps left * seconds for each size of the steps that this run has done

A loop is written `for name in progress(names, "blocks", name=str)`. What works inside it calls `report(...)` with the
errors of a layer, and formats nothing. Steps that have a name (blocks, layers) speak one by one, but for short ones
that tell no error; those and steps without names (samples, tensors) speak only so often. They speak in three ways: a
line of the log; a bar, in a program on a terminal; and a line of JSON in the file of `log_to`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from quark.base.log import logger
from quark.base.progress import seconds_and_peak
from quark.base.progress.bar_display import Bar, drawing
from quark.base.progress.events import write_event
from quark.base.progress.seconds_and_peak import peak_text, seconds_text

T = TypeVar("T")

QUIET_SECONDS = 10.0
"""How long steps without names run before they say how far they are, and again."""
_SHOWN_SECONDS = 1.0
"""How long a bar shows the same status, where that takes time to make."""
_NOTABLE_SECONDS = 0.5
"""A step with a name that takes less, and tells no error, is no line of the log: sixty of them hide the rest."""
OUTPUT_ERROR = "share of the output lost"
"""The measure ||X (W - Q)||^2 / ||X W||^2 of a layer that reads X, whose weight W became Q."""


@dataclass(frozen=True)
class LayerError:
    """The error that an algorithm made in one layer, or in several at once.

    Attributes:
        layer: Its full name.
        error_before: With the nearest rounding, or before the algorithm ran.
        error_after: With what it has now.
        measure: Which error this is.
    """

    layer: str
    error_before: float
    error_after: float
    measure: str


def progress(
    items: Iterable[T],
    loop: str,
    total: int | None = None,
    *,
    name: Callable[[T], str] | None = None,
    done: int = 0,
    size: Callable[[T], float] | None = None,
) -> Iterator[T]:
    """Iterate, and say how far it is.

    Args:
        items: What is left to do.
        loop: What is counted, a plural: "blocks".
        total: How many there are, with those that an earlier run did; None where that is unknown.
        name: The name of an item; each step then speaks. None: they speak every `QUIET_SECONDS`.
        done: How many an earlier run did.
        size: What the time of an item goes with, for items that are a sequence; None: all take the same.
    """
    running = _Loop(loop, total, done, named=name is not None)
    if size is not None and isinstance(items, Sequence):
        running.sizes = [size(item) for item in items]
    _running().append(running)
    bar = Bar(loop, total, done) if drawing() else None
    running.begin()
    try:
        for item in items:
            running.enter("" if name is None else name(item))
            yield item
            # A loop within this one that an error broke off lives as long as the traceback of that error.
            loops = _running()
            del loops[loops.index(running) + 1 :]
            running.leave()
            if bar is not None:
                bar.show(running.done, running.shown)
        running.end(spoken=bar is not None)
    finally:
        if running in _running():
            _running().remove(running)
        if bar is not None:
            bar.close()


def report(layer: str, before: float, after: float, measure: str) -> None:
    """Tell what became of a layer; see `LayerError`. Outside every loop with names it is a line of the debug log."""
    row = LayerError(layer, before, after, measure)
    logger.debug("%s: %s %.4g -> %.4g.", layer, measure, before, after)
    for loop in reversed(_running()):
        if loop.named:
            loop.layers.append(row)
            return


def status(text: str | Callable[[], str]) -> None:
    """Tell how it goes within a step: the loss of an iteration. It is said where nothing was for `QUIET_SECONDS`.

    Args:
        text: Or what makes it when it is said, where that takes time: a device is waited for, whose value is read. A
            bar asks for it `_SHOWN_SECONDS` after it did so before, at the soonest.
    """
    if _running():
        _running()[-1].note(text)


class _Threads(threading.local):
    """The loops that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.loops: list[_Loop] = []


_threads = _Threads()


def _running() -> list[_Loop]:
    return _threads.loops


@dataclass(eq=False)
class _Loop:
    """One loop.

    Attributes:
        name, total, named: As `progress` has them.
        done: Steps that are done, with those of an earlier run.
        layers: What was reported in this step.
        status: The last word of what works in this step, or what makes it.
        said, made: What it made last, and when.
        sizes: Of the steps of this run; none: all take the same.
    """

    name: str
    total: int | None
    done: int
    named: bool
    layers: list[LayerError] = field(default_factory=list)
    status: str | Callable[[], str] = ""
    line: str = ""
    said: str = ""
    made: float = -math.inf
    sizes: Sequence[float] = ()

    def begin(self) -> None:
        self.first, self.started = self.done, seconds_and_peak.seconds_now()
        self.spoke = self.started
        if self.named:
            write_event("begin", loop=self.name, done=self.done, total=self.total)

    def enter(self, step: str) -> None:
        self.step, self.since, self.layers = step, seconds_and_peak.seconds_now(), []

    def leave(self) -> None:
        now = seconds_and_peak.seconds_now()
        self.done += 1
        if self.total is not None and self.done > self.total:
            self.total = None  # samples were taken out of padded batches, which alone were counted
        if self.named:
            self._say_step(now - self.since)
        elif now - self.spoke >= QUIET_SECONDS:
            self.spoke = now
            self._say_progress()

    def note(self, text: str | Callable[[], str]) -> None:
        self.status = text
        if self.named and seconds_and_peak.seconds_now() - self.spoke >= QUIET_SECONDS:
            self.spoke = seconds_and_peak.seconds_now()
            self._say_progress()

    def end(self, spoken: bool) -> None:
        if not self.named:
            return
        seconds = seconds_and_peak.seconds_now() - self.started
        write_event("end", loop=self.name, done=self.done, total=self.total, seconds=seconds)
        if spoken and self.done > self.first:  # a bar vanishes when its loop ends
            logger.info("%s: %d in %s%s.", self.name, self.done - self.first, seconds_text(seconds), peak_text())

    @property
    def word(self) -> str:
        """The text of `status`; one that takes time to make is a while old at most."""
        if isinstance(self.status, str):
            return self.status
        now = seconds_and_peak.seconds_now()
        if now - self.made >= _SHOWN_SECONDS:
            self.said, self.made = self.status(), now
        return self.said

    @property
    def left(self) -> float | None:
        """Seconds that the rest takes, by what those that are done took; None before the first."""
        own = self.done - self.first
        if self.total is None or not own:
            return None
        there, left = sum(self.sizes[:own]), sum(self.sizes[own:])
        share = left / there if there else (self.total - self.done) / own
        return (seconds_and_peak.seconds_now() - self.started) * share

    def _say_step(self, seconds: float) -> None:
        before, after, measure = mean_errors(self.layers)
        left, self.status, now = self.left, "", seconds_and_peak.seconds_now()
        write_event(
            "block", loop=self.name, block=self.step, index=self.done, total=self.total,
            layers=[asdict(row) for row in self.layers], error_before=before, error_after=after, measure=measure,
            seconds=seconds, eta_s=left,
        )  # fmt: skip
        error = f"{measure} {before:.3g} -> {after:.3g}" if before is not None and after is not None else ""
        if error and len(self.layers) > 1:
            error += f" (mean of {len(self.layers)})"
        self.line = f"{self.step}: {', '.join(filter(None, (error, seconds_text(seconds))))}{peak_text()}"
        if error or seconds >= _NOTABLE_SECONDS or now - self.spoke >= QUIET_SECONDS:
            self.spoke = now
            if not drawing():
                logger.info("%s %s, %s%s.", self.name, self.count, self.line, self._left_text())

    def _say_progress(self) -> None:
        write_event(
            "progress", loop=self.name, index=self.done, total=self.total, status=self.word or None,
            eta_s=self.left,
        )  # fmt: skip
        if not drawing():
            status = f", {self.word}" if self.word else ""
            logger.info("%s %s%s%s.", self.name, self.count, status, self._left_text())

    @property
    def count(self) -> str:
        """As "3/32", or "3 so far" where the end is unknown."""
        return f"{self.done} so far" if self.total is None else f"{self.done}/{self.total}"

    @property
    def shown(self) -> str:
        """The text beside a bar: the time that is left first, as a narrow terminal leaves out the end."""
        said = self.line or self.word
        return f"{self._left_text()}{', ' if said else ''}{said}".removeprefix(", ")

    def _left_text(self) -> str:
        left = self.left
        return "" if left is None or self.done == self.total else f", about {seconds_text(left)} left"


def mean_errors(rows: list[LayerError]) -> tuple[float | None, float | None, str | None]:
    """The means of the errors before and after, and their measure: the last one, where algorithms have several."""
    if not rows:
        return None, None, None
    measure = rows[-1].measure
    same = [row for row in rows if row.measure == measure]
    return sum(row.error_before for row in same) / len(same), sum(row.error_after for row in same) / len(same), measure
