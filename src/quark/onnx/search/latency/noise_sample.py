"""noise_sample: what a model runs on to be timed where there are no samples.

Times depend on shapes, and hardly on values. An axis without a size has the first of SIZES with which the model runs,
the first axis, and those of the same name, 1. Integers are 1: a row of a table, a place that a mask lets through, a
length that is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import onnxruntime

from quark.errors import CalibrationError, ConfigError, NotSupportedError, QuarkError
from quark.onnx.calibration.data.inputs import Feed, Input, model_inputs
from quark.onnx.calibration.data.random_reader import RandomDataReader
from quark.onnx.graph.model_file import split_weights
from quark.onnx.graph.sessions import open_session, run_sample

SIZES = (128, 64, 48, 32, 16, 256, 8, 1024, 16000, 1)
"""Of all axes without one, but the first: usual ones of images, lines of text and sequences; last of sound."""
_MOST_VALUES = 1 << 24
"""Values of an input that are still tried."""


class NoiseSample(NamedTuple):
    """A sample of noise on which a model runs.

    Attributes:
        feed: The sample.
        words: Its shapes.
        session: That of the model, in which it ran, on one thread.
    """

    feed: Feed
    words: str
    session: onnxruntime.InferenceSession


def noise_sample(model: ir.Model) -> NoiseSample | None:
    """A sample of noise on which a model runs; None where it runs on none of the shapes that are tried.

    Args:
        model: Its weights are not copied.
    """
    try:
        inputs = model_inputs(model)
    except NotSupportedError:
        return None  # a sequence, or an optional
    if not all(map(_can_be_made, inputs.values())):
        return None
    try:
        proto, weights = split_weights(model)
        session = open_session(proto, weights=weights)
    except QuarkError:
        return None  # it lacks an operator, or does not load: nothing can be timed here
    ones = {name: (1, 1) for name, entry in inputs.items() if np.dtype(entry.dtype).kind != "f"}
    for shapes in _shapes(inputs):
        try:
            feed = RandomDataReader(model, shapes, ones).get_next()
            assert feed is not None
            run_sample(session, None, feed)
        except (CalibrationError, ConfigError):
            continue
        shown = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
        return NoiseSample(feed, f"noise of {shown}", session)
    return None


def _can_be_made(entry: Input) -> bool:
    return entry.shape is not None and np.dtype(entry.dtype).kind in "fiub"


def _shapes(inputs: Mapping[str, Input]) -> Iterator[dict[str, list[int]]]:
    """The shapes of all inputs that are tried, in this order."""
    known = [entry.shape or () for entry in inputs.values()]
    fixed = all(isinstance(size, int) for shape in known for size in shape[1:])
    batch = {shape[0] for shape in known if shape and isinstance(shape[0], str)}
    for size in SIZES[-1:] if fixed else SIZES:
        shapes = {name: _shape(entry, size, batch) for name, entry in inputs.items()}
        if size == 1 or max(map(math.prod, shapes.values()), default=1) <= _MOST_VALUES:
            yield shapes


def _shape(entry: Input, size: int, batch: Collection[str]) -> list[int]:
    """The shape of an input with a size for the axes that have none, and 1 for those of the batch."""
    return [
        known if isinstance(known, int) else size if axis and known not in batch else 1
        for axis, known in enumerate(entry.shape or ())
    ]
