"""verdict: what is left of one part of an output, as SQNR and as decisions, over any number of samples.

    sqnr = 10 log10( sum(x^2) / sum((x - y)^2) )                x: of the float model, y: of the quantized one; finite x
    decisions = kept / (events + alarms)

An event is a value that stands out: |x - m| is half of the largest there is, or more, with m the mean of its position
over the samples. It is kept where y has half of that, on the same side; an alarm is a y that stands out where x does
not by half. Of labels (bool, or what an ArgMax gives) an event is another label than the commonest. SQNR alone tells
nothing of events that are rare: all of its signal may be the value in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from quark.core.array import NumpyArray
from quark.core.metrics import decibel
from quark.onnx.graph.output_parts import SILENT, OutputPart
from quark.onnx.search.sums import LEVEL, margin

LEAST = 10.0
"""dB: below it, the noise has a third of the size of the output."""
KEPT, MISSED = 0.9, 0.5
"""Share of the decisions that shows that nothing is lost, whatever the SQNR; and below which the task is."""
_STANDS_OUT = 0.25
"""Share of the largest value by which events have to differ from the rest: else there are none."""
_DISAGREE = 10.0
"""dB between the samples of one part, in their SQNR or in their power."""

Pair = tuple[NumpyArray, NumpyArray]


@dataclass(frozen=True)
class Verdict:
    """The comparison of one part of an output with that of the float model.

    Attributes:
        part: Of an output.
        sqnr: In dB; -inf where y is not finite, None of labels.
        decisions: Share of the decisions that are kept; None where nothing stands out.
        silent: Whether it stored nothing on all samples.
        unclear: Whether more samples may tell more.
        margin: dB by which as many other samples may show a lower SQNR; 0 where these do not tell.
    """

    part: OutputPart
    sqnr: float | None
    decisions: float | None
    silent: bool = False
    unclear: bool = False
    margin: float = 0.0

    def lost(self, least: float = LEAST) -> bool:
        """Return True where too little is left: a bound above LEAST is one for the SQNR alone."""
        if self.silent:
            return False
        kept = self.decisions is not None and self.decisions >= KEPT and least <= LEAST
        low = self.sqnr is not None and self.sqnr < least and not kept
        return low or (self.decisions is not None and self.decisions < MISSED)

    def rank_at(self, least: float) -> tuple[bool, float]:
        """Lower is worse."""
        return not self.lost(least), math.inf if self.silent or self.sqnr is None else self.sqnr


@dataclass
class _Sums:
    """The sums of a part over samples."""

    signal: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    peak: float = 0.0
    other_peak: float = 0.0

    @classmethod
    def of(cls, pairs: Iterable[Pair]) -> _Sums:
        """The sums over some samples."""
        sums = cls()
        for x, y in pairs:
            sums.update(x, y)
        return sums

    def update(self, x: NumpyArray, y: NumpyArray) -> None:
        finite = np.isfinite(x)
        x, y = x[finite].astype(np.float64), y[finite].astype(np.float64)
        self.signal.append(float(x @ x))
        self.noise.append(float((x - y) @ (x - y)) if np.isfinite(y).all() else math.inf)
        self.peak = max(self.peak, float(np.abs(x).max(initial=0)))
        self.other_peak = max(self.other_peak, float(np.abs(y).max(initial=0)))

    @property
    def sqnr(self) -> float:
        return _decibels(sum(self.signal), sum(self.noise))

    @property
    def margin(self) -> float:
        """By how many dB as many other samples may show less; see `quark.onnx.search.sums`."""
        signal, noise = sum(self.signal), sum(self.noise)
        if not math.isfinite(noise):
            return 0.0
        rest = ((signal - s, max(0.0, noise - n)) for s, n in zip(self.signal, self.noise, strict=True))
        return margin([_decibels(*each) for each in rest], LEVEL)

    @property
    def disagree(self) -> bool:
        """True where some samples say another thing than others."""
        powers = [10 * math.log10(max(signal, 1e-300)) for signal in self.signal]
        ratios = [min(_decibels(s, n), 99.0) for s, n in zip(self.signal, self.noise, strict=True) if s]
        return any(max(each, default=0) - min(each, default=0) > _DISAGREE for each in (powers, ratios))


def verdict_of(part: OutputPart, pairs: Iterable[Pair]) -> Verdict | None:
    """The verdict of a part.

    Args:
        part: Of an output.
        pairs: Of each sample the part of the float output, and the same of the quantized one; read three times.

    Returns:
        None where there is no value, or no signal, to compare by.
    """
    pairs = [(x, y) for x, y in pairs if x.size or x.shape != y.shape]
    if not pairs or not all(x.shape == y.shape for x, y in pairs):
        return None
    if pairs[0][0].dtype.kind in "biu":
        return Verdict(part, None, _labels(pairs))
    sums = _Sums.of(pairs)
    if not sum(sums.signal):
        return None
    if part.bounded and sums.peak < SILENT and sums.other_peak < 2 * SILENT:
        return Verdict(part, sums.sqnr, None, silent=True, unclear=True)
    found = Verdict(part, sums.sqnr, _events(pairs, sums.peak) if len(pairs) > 1 else None, margin=sums.margin)
    return replace(found, unclear=True) if found.lost() or sums.disagree else found


def _events(pairs: list[Pair], peak: float) -> float | None:
    """The share of decisions that is kept."""
    one_shape = len({x.shape for x, _ in pairs}) == 1
    finite = [np.where(np.isfinite(x), x, 0) for x, _ in pairs]
    mean = sum(x.astype(np.float64) for x in finite) / len(pairs) if one_shape else np.mean([x.mean() for x in finite])
    height = max(float(np.abs(x - mean).max(initial=0)) for x in finite)
    if height < _STANDS_OUT * peak:
        return None
    events = kept = alarms = 0
    for (_, y), x in zip(pairs, finite, strict=True):
        before, after = x - mean, y - mean
        event = np.abs(before) >= height / 2
        events += int(event.sum())
        kept += int((event & (after * np.sign(before) >= np.abs(before) / 2)).sum())
        alarms += int(((np.abs(after) >= height / 2) & (np.abs(before) < height / 4)).sum())
    return kept / (events + alarms)


def _labels(pairs: list[Pair]) -> float | None:
    """The share of other labels than the commonest that is kept."""
    values, counts = np.unique(np.concatenate([x.ravel() for x, _ in pairs]), return_counts=True)
    if len(values) < 2:
        return None
    rest = values[counts.argmax()]
    kept = sum(int(((x == y) & (x != rest)).sum()) for x, y in pairs)
    return kept / sum(int(((x != rest) | (y != rest)).sum()) for x, y in pairs)


def _decibels(signal: float, noise: float) -> float:
    return -math.inf if math.isinf(noise) else decibel(signal, noise)


@dataclass(frozen=True)
class Damage:
    """The comparison of the outputs with those of the float model, by the worst part.

    Attributes:
        sqnr: In dB, of the worst part of an output; -inf where it is no longer finite.
        output: That output, or its part, as text.
        samples: How many samples were run.
        decisions: Share of its decisions that are kept; None where no value stands out.
        lost: Whether that is too little for any task.
        silent: Whether no output stored anything on these samples.
        margin: dB by which as many other samples may show less; 0 where that is little.
    """

    sqnr: float
    output: str
    samples: int
    decisions: float | None = None
    lost: bool = False
    silent: bool = False
    margin: float = 0.0

    @property
    def bound(self) -> str:
        """A sentence that says what other samples show at least, where these samples differ; else ""."""
        return f" Other samples most often show {self.sqnr - self.margin:.1f} dB or more." if self.margin else ""

    def __str__(self) -> str:
        told = "of the values that stand out (peaks, detections) still do"
        kept = "" if self.decisions is None else f"{self.decisions:.0%} {told}"
        where = f"at the output {self.output}, over {self.samples} samples"
        if math.isnan(self.sqnr):
            return f"{kept or 'one label'} {where}"
        nothing = "no value stands out in these samples" if self.silent else ""
        return "; ".join(filter(None, (f"SQNR {self.sqnr:.1f} dB {where}", kept, nothing)))
