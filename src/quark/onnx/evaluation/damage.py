"""What a quantization did to the outputs of a model, on a few of the samples that it was calibrated with.

    sqnr = 10 log10( sum(x^2) / sum((x - y)^2) )      x: an output of the float model, y: the same of the quantized one

over all samples and finite x; the worst float output counts. It costs a forward of each model for a few samples, and
makes every mistake of placement or calibration visible before the file is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.errors import DamageError, FormatError, QuarkError
from quark.log import logger
from quark.onnx.bodies.body_model import bodies_of
from quark.onnx.calibration.calibrate import model_session
from quark.onnx.calibration.data.inputs import Feed, model_inputs
from quark.onnx.calibration.data.readers import as_reader
from quark.onnx.config.settings import Settings
from quark.onnx.evaluation.compare_models import ComparedLayer, damaged_layers
from quark.onnx.graph.model_file import to_proto
from quark.onnx.graph.proto_file import read_header
from quark.onnx.graph.sessions import open_session, run_sample
from quark.onnx_ops.saving import PROTOBUF_LIMIT, weight_bytes

Model = onnx.ModelProto | Path
"""A model in memory, weights inside, or its file."""

SAMPLES = 4
"""Most samples that are looked at."""
LEAST = 10.0
"""dB: below it, the noise has a third of the size of the output."""
BLAMED = 3
"""Nodes that an error names."""


@dataclass(frozen=True)
class Damage:
    """What is left of the outputs.

    Attributes:
        sqnr: In dB, of the worst output; -inf where it is no longer finite.
        output: The name of that output.
        samples: How many samples were run.
    """

    sqnr: float
    output: str
    samples: int

    def __str__(self) -> str:
        return f"SQNR {self.sqnr:.1f} dB at the output {self.output}, over {self.samples} samples"


class SpreadSamples:
    """A reader that keeps a few of the samples that are read through it, spread over all: the first may be silence.

    Every sample is kept until there are too many, then every other one, and so on; so memory holds a few at any time.

    Args:
        data: A reader, or an iterable of samples.
        model: The model that they are for.
    """

    def __init__(self, data: Any, model: ir.Model) -> None:
        self._data, self._inputs, self._feeds = data, model_inputs(model), list[Feed]()
        self._count, self._stride = 0, 1

    @cached_property
    def _reader(self) -> Any:
        # Made when it is read: what a dynamic quantization is given besides may be no data.
        return as_reader(self._data, self._inputs)

    def get_next(self) -> Any:
        """The next sample."""
        feed = self._reader.get_next()
        if isinstance(feed, dict):
            if self._count % self._stride == 0:
                self._feeds.append({name: np.asarray(value).copy() for name, value in feed.items()})
            if len(self._feeds) > SAMPLES:
                self._feeds, self._stride = self._feeds[::2], 2 * self._stride
            self._count += 1
        return feed

    def feeds(self) -> list[Feed]:
        """What was kept; read now, where calibration needed none (ranges from a file, weights only)."""
        with suppress(QuarkError):
            while self._count < SAMPLES and self.get_next() is not None:
                pass
        return self._feeds


def damage(model: ir.Model, quantized: Model, feeds: Sequence[Feed], settings: Settings) -> Damage | None:
    """Compare the outputs of two models.

    Args:
        model: The float model as it was loaded: the runtime dies of some files that `load` mends.
        quantized: What was made of it.
        feeds: Samples.
        settings: The execution providers.

    Returns:
        None where nothing can be compared: no samples, no float output with values, outputs whose shape follows from
        values, models of other inputs or outputs, or with operators that ONNX Runtime lacks.

    Raises:
        FormatError: ONNX Runtime does not load the quantized model.
    """
    if isinstance(quantized, onnx.ModelProto) and quantized.ByteSize() > PROTOBUF_LIMIT:
        return None  # no session takes it from memory
    after = read_header(quantized) if isinstance(quantized, Path) else quantized
    names = [value.name or "" for value in model.graph.outputs]
    alike = list(map(str, model_inputs(model).values())) == list(map(str, model_inputs(after).values()))
    if not feeds or not alike or names != [value.name for value in after.graph.output]:
        return None
    signal, noise = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    try:
        for name, x, y in _outputs(model, quantized, names, feeds, settings):
            if x.shape == y.shape and x.dtype.kind == "f":
                finite = np.isfinite(x)
                x, y = x[finite].astype(np.float64), y[finite].astype(np.float64)
                signal[name] += float(x @ x)
                noise[name] += float((x - y) @ (x - y)) if np.isfinite(y).all() else math.inf
    except FormatError:
        raise
    except QuarkError as error:
        logger.debug(f"The outputs cannot be compared: {error}")
        return None
    found = {name: _decibels(signal[name], noise[name]) for name in names if signal[name]}
    if not found:
        return None
    worst = min(found, key=lambda name: found[name])
    return Damage(found[worst], worst, len(feeds))


def refuse_damage(
    found: Damage | None, least: float | None, model: ir.Model, quantized: Model, feeds: Sequence[Feed]
) -> None:
    """Log what was found; raise DamageError where it is below `least`, and name the nodes that did it.

    Args:
        found: From `damage`.
        least: In dB; None: log only.
        model, quantized, feeds: As for `damage`.
    """
    if found is None:
        return
    if found.sqnr >= (LEAST if least is None else least):
        logger.info(f"Quantized against float on calibration samples: {found}.")
        return
    if least is None:
        logger.warning(f"The quantized model has lost its outputs on calibration samples: {found}.")
        return
    named = weight_bytes(model) < PROTOBUF_LIMIT
    nodes = damaged_layers(to_proto(model), quantized, feeds)[:BLAMED] if named else []
    shown = "; ".join(f"{layer.node} ({before:.1f} dB -> {layer.sqnr:.1f})" for layer, before in nodes)
    raise DamageError(
        f"The quantized model has lost its outputs on calibration samples: {found}; {least:g} dB are asked for. "
        f"{f'Most is lost at {shown}. ' if shown else ''}Possible: {_exclusion(model, nodes)}another configuration, "
        "more or better calibration data, or --allow-damage to write it as it is."
    )


def _exclusion(model: ir.Model, blamed: Sequence[tuple[ComparedLayer, float]]) -> str:
    """What excluding can do, with a comma behind: nothing where no node is named.

    Without an If, Loop or Scan there may be nothing left to quantize: nodes within it can be named as well.
    """
    if not blamed:
        return ""
    holders = {body.node.name for body in bodies_of(model.graph)}
    within = all(layer.node in holders for layer, _ in blamed)
    return f"exclude {'nodes within their bodies' if within else 'these nodes'}, "


def _outputs(
    model: ir.Model, quantized: Model, names: list[str], feeds: Sequence[Feed], settings: Settings
) -> Iterator[tuple[str, NumpyArray, NumpyArray]]:
    with model_session(model, [], settings) as before:
        expected = [run_sample(before, names, feed) for feed in feeds]
    after = open_session(quantized)
    for feed, arrays in zip(feeds, expected, strict=True):
        for name, x, y in zip(names, arrays, run_sample(after, names, feed), strict=True):
            if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
                yield name, x, y


def _decibels(signal: float, noise: float) -> float:
    return math.inf if noise == 0 else -math.inf if math.isinf(noise) else 10 * math.log10(signal / noise)
