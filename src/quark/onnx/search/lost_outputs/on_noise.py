"""on_noise: whether a quantized model has lost its outputs, told by noise where there are no samples.

    white   normal values: every frequency and every neighbour says as much as the others
    brown   X(f) / f along each axis: most is said by a few of them, as in sound and pictures, and little by the rest

at three loudnesses, as nobody knows which inputs are usual. Outputs are lost where they are for most of the loudnesses
of one colour: a detector may say nothing of noise, and saturate where it is noisy. They are in doubt where parts are
that no operator keeps from 0 to 1: what a classifier makes of noise says little of it (2.7 to 54.7 dB of one that keeps
40 on pictures), and no other of 16 trained models is below 20 dB at most loudnesses, but one that is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from quark.base.log import logger
from quark.core.array import NumpyArray
from quark.errors import CalibrationError, QuarkError
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.graph.output_parts import OutputPart, compared_parts
from quark.onnx.graph.sessions import integer_kernels_are_exact, open_session, run_sample
from quark.onnx.search.history import TimeBudget
from quark.onnx.search.latency.noise_sample import NoiseSample
from quark.onnx.search.lost_outputs.verdict import LEAST, Verdict, verdict_of

_AMPLITUDES = (1.0, 1e-2, 1e2)
_DOUBTFUL = 20.0
"""dB: below it, the noise has a tenth of the size of the output."""
SECONDS = 10.0
"""Seconds for all runs, after which nothing is said."""
_SHORTEST = 8
"""Values along an axis that have a colour."""


@dataclass(frozen=True)
class _LeftOnNoise:
    """The SQNR of outputs on noise, where it is low.

    Attributes:
        sqnr: In dB, the best of those that are too low.
        words: That, and of which noise.
    """

    sqnr: float
    words: str

    @property
    def lost(self) -> bool:
        """True where that is too little for any task; else it is in doubt."""
        return self.sqnr < LEAST


def little_on_noise(
    model: ir.Model, quantized: onnx.ModelProto | Path, sample: NoiseSample | None
) -> _LeftOnNoise | None:
    """Compare two models on noise.

    Args:
        model: The float model as it was loaded.
        quantized: What was made of it.
        sample: What the float model runs on; None where that is not known.

    Returns:
        What is left, where that is little; None where it is not, or nobody can tell: no input of floats, no output to
        compare, a model that does not run on noise, or takes seconds for one sample.
    """
    if sample is None or all(array.dtype.kind != "f" for array in sample.feed.values()):
        return None
    doubtful = None
    try:
        parts = compared_parts(model)
        sessions = sample.session, open_session(quantized, in_float=not integer_kernels_are_exact())
        for colour in ("white", "brown"):
            words = f"dB on {colour} noise of most loudnesses ({sample.words})"
            found = list(_left(parts, sessions, sample.feed, colour))
            lost = _mostly_below(LEAST, found)
            if lost is not None:
                return _LeftOnNoise(lost, f"SQNR {lost:.1f} {words}")
            low = _mostly_below(_DOUBTFUL, [[each for each in told if not each.part.bounded] for told in found])
            if low is not None and doubtful is None:
                doubtful = _LeftOnNoise(low, f"SQNR {low:.1f} {words}")
    except QuarkError as error:
        logger.debug("The outputs cannot be compared on noise: %s", error)
    return doubtful


def _mostly_below(bound: float, found: Sequence[Sequence[Verdict]]) -> float | None:
    """The best SQNR of those below a bound, of the worst part for each loudness; None where these are not most."""
    worst = [min((each.sqnr for each in told if each.sqnr is not None), default=None) for told in found]
    low = [sqnr for sqnr in worst if sqnr is not None and sqnr < bound]
    return max(low) if 2 * len(low) > len(_AMPLITUDES) else None


def _left(
    parts: Sequence[OutputPart], sessions: Iterable[onnxruntime.InferenceSession], sample: Feed, colour: str
) -> Iterator[list[Verdict]]:
    """Yield the verdicts of the parts of the outputs that say something, for one loudness after another."""
    budget = TimeBudget.of(SECONDS / 2)
    names = list(dict.fromkeys(part.tensor for part in parts))
    for amplitude in _AMPLITUDES:
        if not parts or budget.left() < 0:
            return
        feed = {name: _noise(array, colour, amplitude) for name, array in sample.items()}
        try:
            before, after = (dict(zip(names, run_sample(each, names, feed), strict=True)) for each in sessions)
        except CalibrationError:  # a table has no row for what is so noisy
            continue
        pairs = [(part, before[part.tensor], after[part.tensor]) for part in parts]
        found = [verdict_of(part, [(part.of(x), part.of(y))]) for part, x, y in pairs if np.shape(x) == np.shape(y)]
        yield [each for each in found if each is not None and not each.silent]


def _noise(array: NumpyArray, colour: str, amplitude: float) -> NumpyArray:
    """White noise of a colour and a loudness; integers as they are."""
    if array.dtype.kind != "f":
        return array
    values = array.astype(np.float64)
    for axis in range(1, array.ndim) if colour == "brown" else ():
        size = array.shape[axis]
        if size >= _SHORTEST:
            frequencies = np.maximum(np.fft.rfftfreq(size), 1 / size)
            spectrum = np.moveaxis(np.fft.rfft(values, axis=axis), axis, -1) / frequencies
            values = np.moveaxis(np.fft.irfft(spectrum, size), -1, axis)
    deviation = float(values.std()) or 1.0
    return np.asarray((values * (amplitude / deviation)).astype(array.dtype))
