"""on_noise: whether a quantized model has lost its outputs, told by noise where there are no samples.

    white   normal values: every frequency and every neighbour says as much as the others
    brown   X(f) / f along each axis: most is said by a few of them, as in sound and pictures, and little by the rest

at three loudnesses, as nobody knows which inputs are usual. Outputs are lost where they are for most of the loudnesses
of one colour: a detector may say nothing of noise, and saturate where it is loud.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.errors import CalibrationError, QuarkError
from quark.log import logger
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.evaluation.lost_outputs.verdict import LEAST, judge
from quark.onnx.graph.model_file import split_weights
from quark.onnx.graph.sessions import open_session, run_sample
from quark.onnx.latency.noise_sample import noise_sample
from quark.onnx.parts.output_parts import judged_parts
from quark.onnx_ops.saving import PROTOBUF_LIMIT, weight_bytes

LOUDNESSES = (1.0, 1e-2, 1e2)
SECONDS = 10.0
"""What may be run in, after which nothing is said."""
SHORTEST = 8
"""Values along an axis that have a colour."""


def lost_on_noise(model: ir.Model, quantized: onnx.ModelProto | Path) -> str | None:
    """Compare two models on noise.

    Args:
        model: The float model as it was loaded.
        quantized: What was made of it.

    Returns:
        What is left, and of which noise, where that is too little; None where it is not, or nobody can tell: no input
        of floats, no output to judge, a model that does not run on noise, or takes seconds for one sample.
    """
    sample = None if weight_bytes(model) >= PROTOBUF_LIMIT else noise_sample(model)
    if sample is None or all(array.dtype.kind != "f" for array in sample[0].values()):
        return None
    try:
        for colour in ("white", "brown"):
            worst = [each for each in _left(model, quantized, sample[0], colour) if each is not None and each < LEAST]
            if 2 * len(worst) > len(LOUDNESSES):
                return f"SQNR {max(worst):.1f} dB on {colour} noise of most loudnesses ({sample[1]})"
    except QuarkError as error:
        logger.debug("The outputs cannot be compared on noise: %s", error)
    return None


def _left(model: ir.Model, quantized: onnx.ModelProto | Path, sample: Feed, colour: str) -> Iterator[float | None]:
    """The SQNR of the worst part of the outputs for each loudness; None where none of them says anything."""
    proto, weights = split_weights(model)
    sessions = open_session(proto, weights=weights), open_session(quantized)
    parts, end = judged_parts(model), time.monotonic() + SECONDS / 2
    names = list(dict.fromkeys(part.tensor for part in parts))
    for loudness in LOUDNESSES:
        if not parts or time.monotonic() > end:
            return
        feed = {name: _noise(array, colour, loudness) for name, array in sample.items()}
        try:
            before, after = (dict(zip(names, run_sample(each, names, feed), strict=True)) for each in sessions)
        except CalibrationError:  # a table has no row for what is so loud
            continue
        pairs = [(part, before[part.tensor], after[part.tensor]) for part in parts]
        found = [judge(part, [(part.of(x), part.of(y))]) for part, x, y in pairs if np.shape(x) == np.shape(y)]
        told = [each.sqnr for each in found if each is not None and not each.silent and each.sqnr is not None]
        yield min(told, default=None)


def _noise(array: NumpyArray, colour: str, loudness: float) -> NumpyArray:
    """White noise of a colour and a loudness; integers as they are."""
    if array.dtype.kind != "f":
        return array
    values = array.astype(np.float64)
    for axis in range(1, array.ndim) if colour == "brown" else ():
        size = array.shape[axis]
        if size >= SHORTEST:
            frequencies = np.maximum(np.fft.rfftfreq(size), 1 / size)
            spectrum = np.moveaxis(np.fft.rfft(values, axis=axis), axis, -1) / frequencies
            values = np.moveaxis(np.fft.irfft(spectrum, size), -1, axis)
    deviation = float(values.std()) or 1.0
    return np.asarray((values * (loudness / deviation)).astype(array.dtype))
