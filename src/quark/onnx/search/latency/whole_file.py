"""whole_file: a last look at what was written: whether it takes longer than the float model.

    ratio = mean of the faster half of the runs of the file / the same of the float model, the runs of both by turns

Kernels are timed one by one before. What they do to each other, and to the program between them, is seen here alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime

from quark.base.log import logger
from quark.errors import QuarkError, SlowerThanFloatError
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.config.settings import Settings
from quark.onnx.graph.model_file import split_weights
from quark.onnx.graph.sessions import open_session, run_sample
from quark.onnx.search.latency.kernels import typical
from quark.onnx.search.latency.noise_sample import NoiseSample

FEWEST, MOST, SECONDS = 6, 300, 0.6
"""Runs of each, as many as these seconds have room for."""
FAR, SOON = 0.2, 0.1
"""A ratio that is this share away from the bound in question ends the runs after these seconds, if FEWEST are done.

After twice and four times as long half and a quarter of it are enough, which is still over twice the TOLERANCE.
"""
TOLERANCE = 0.02
"""The spread of sessions of one file: 0.97 to 1.03 on a busy machine, under 1.01 in most of 32 looks."""
_MOST_PAIRS = 0.75
"""Share of the runs, each beside that of the float model before or after it, that have to be slower, too."""
LOOKS = 2
"""A file is slower where as many sessions, each opened anew, say so."""


@dataclass(frozen=True)
class FileRatio:
    """The time of a file over that of the float model.

    Attributes:
        ratio: Of both.
        seconds: Of a run of the float model.
        pairs: Share of the runs that took longer than the one of the float model beside it.
    """

    ratio: float
    seconds: float
    pairs: float

    @property
    def faster(self) -> bool:
        """True where the file is faster by more than it may differ from itself."""
        return self.ratio < 1 - TOLERANCE

    @property
    def slower(self) -> bool:
        """True where the file is slower by more than it may differ from itself."""
        return self.ratio > 1 + TOLERANCE and self.pairs >= _MOST_PAIRS


def refuse_slower(
    model: ir.Model,
    quantized: onnx.ModelProto | Path,
    feeds: Sequence[Feed],
    settings: Settings,
    sizes: tuple[int, int] = (1, 0),
    noise: NoiseSample | None = None,
) -> None:
    """Log what a quantized model takes beside the float one.

    Args:
        model: The float model as it was loaded.
        quantized: What was made of it.
        feeds: Samples, of which the first is run; noise where there are none.
        settings: The number of threads.
        sizes: Bytes of the float model, and of the quantized one.
        noise: What the float model runs on where there are no samples, if it does.

    Raises:
        SlowerThanFloatError: It is slower; or no faster, and no smaller.
    """
    if feeds:
        feed, words, session = feeds[0], "the first sample", None
    elif noise is not None:
        feed, words, session = noise
    else:
        logger.info("The time of the file is not known: there are no samples, and the model does not run on noise.")
        return
    try:
        found = file_ratio(model, quantized, feed, settings.measurement.threads, session=session)
    except QuarkError as error:
        logger.info("The time of the file is not known: %s", error)
        return
    if found.slower:
        raise SlowerThanFloatError(
            f"The quantized model takes {found.ratio:.2f} times as long as the float one, on {words}. Possible: the "
            "float model as it is, or --no-measure for a smaller file."
        )
    before, after = sizes
    if not found.faster and after >= before:
        raise SlowerThanFloatError(
            f"The quantized model is neither faster than the float one ({found.ratio:.2f} of its time, on {words}) nor "
            f"smaller ({after} bytes for {before}). Possible: the float model as it is."
        )
    logger.info(f"Time / float {found.ratio:.2f} ({found.seconds * 1e3:.3f} ms in float, on {words}).")


def file_ratio(
    model: ir.Model,
    quantized: onnx.ModelProto | Path,
    feed: Feed,
    threads: int = 1,
    clock: Callable[[], float] | None = None,
    session: onnxruntime.InferenceSession | None = None,
) -> FileRatio:
    """Run both by turns on a sample.

    Args:
        model: The float model as it was loaded.
        quantized: What was made of it.
        feed: The sample.
        threads: Within an operator.
        clock: Gives seconds; None for that of this thread, which no other program lengthens, where it does all the
            work.
        session: Of the float model on one thread, if there is one: the first look is taken with it.

    Raises:
        FormatError: ONNX Runtime does not load one of them.
        NotSupportedError: It lacks an operator.
        CalibrationError: A model fails on the sample.
    """
    clock = clock or _clock(threads)

    def look(before: onnxruntime.InferenceSession | None) -> FileRatio:
        if before is None:
            proto, weights = split_weights(model)
            before = open_session(proto, threads=threads, weights=weights)
        return _by_turns(before, open_session(quantized, threads=threads), feed, clock)

    found = look(session if threads == 1 else None)
    for _ in range(LOOKS - 1):
        if found.slower:
            found = look(None)
    return found


def time_ratio(
    first: onnx.ModelProto, second: onnx.ModelProto, feed: Feed, threads: int = 1, bound: float = 1.0
) -> float:
    """The time of a second file over that of a first one, each in a session of its own; the rest is as above.

    The runs end early where the ratio is far from `bound`.
    """
    sessions = (open_session(first, threads=threads), open_session(second, threads=threads))
    return _by_turns(*sessions, feed, _clock(threads), bound).ratio


def _clock(threads: int) -> Callable[[], float]:
    return time.thread_time if threads == 1 else time.perf_counter


def _by_turns(
    first: onnxruntime.InferenceSession,
    second: onnxruntime.InferenceSession,
    feed: Feed,
    clock: Callable[[], float],
    bound: float = 1.0,
) -> FileRatio:
    sessions = (first, second)
    times: tuple[list[float], list[float]] = ([], [])
    for session in sessions:
        run_sample(session, None, feed)  # warms up
    spent, soon = 0.0, SOON
    while len(times[0]) < FEWEST or (len(times[0]) < MOST and spent < SECONDS):
        if spent >= soon and len(times[0]) >= FEWEST:
            if abs(typical(times[1]) / typical(times[0]) / bound - 1) > FAR * SOON / soon:
                break
            soon = 2 * spent
        # Each is the first as often as the other.
        for which in ((0, 1), (1, 0))[len(times[0]) % 2]:
            start = clock()
            run_sample(sessions[which], None, feed)
            times[which].append(clock() - start)
            spent += times[which][-1]
    before, after = map(typical, times)
    longer = sum(second > first for first, second in zip(*times, strict=True))
    return FileRatio(after / before, before, longer / len(times[0]))
