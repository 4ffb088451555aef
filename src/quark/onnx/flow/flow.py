"""The flow on one page: algorithms, choice, placement, calibration, writing; then the same for bodies.

What is still to be chosen is chosen by whoever calls it (`search/settle.py`): here is no search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx_ir as ir

from quark.base.log import logger
from quark.errors import NothingToQuantizeError
from quark.onnx.algorithms import check_data, run_after, run_before
from quark.onnx.algorithms.quantized_layers import QuantizedLayers
from quark.onnx.algorithms.rescaling.bias_correction import (
    correct_where_certain,
    learning_starts_corrected,
    wanted_means,
)
from quark.onnx.algorithms.rescaling.linear_means import LinearMeans
from quark.onnx.calibration.besides import Besides
from quark.onnx.calibration.calibrate import repeatable, run_random
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.joined_ends import leave_joined_ends
from quark.onnx.calibration.statistics import Statistics, fingerprint
from quark.onnx.config.settings import Settings
from quark.onnx.decide import decide
from quark.onnx.flow.float_bodies import FloatBodies
from quark.onnx.npu.averaged_sizes import measure_sizes, needs_samples
from quark.onnx.npu.simulation import simulate
from quark.onnx.passes import run_passes
from quark.onnx.passes.copy_shared_init import copy_shared_init
from quark.onnx.qdq.value_infos import fill_value_infos
from quark.onnx.qdq.write_qdq import drop_unused_constants
from quark.onnx_ops.compact import drop_inferable, share_constants


@dataclass(frozen=True)
class FloatForm:
    """A float model as algorithms leave it, before it is decided what is quantized.

    Attributes:
        model: The model.
        settings: What to quantize, and how.
        reader: Calibration data.
        data: The same, read as often as it takes; None where no algorithm needs that.
        identity: Fingerprint of the model, or "".
        statistics: Of calibration, in memory; None for those of a file, or of one pass.
    """

    model: ir.Model
    settings: Settings
    reader: Any
    data: Samples | None
    identity: str
    statistics: Statistics | None


Choose = Callable[[FloatForm], FloatForm]
"""Gives settings in which nothing is open."""


@dataclass(frozen=True)
class Written:
    """A model as its codes were written: biases, weights and bodies are as they were.

    Attributes:
        model: The model, which runs.
        settings: Of it and of its bodies, as they were before anything was chosen.
        reader: Calibration data.
        choose: What decides the rest.
        known: Statistics in memory by fingerprint; None for those of each pass.
        bodies: Those of the float model.
        quantized: The layers; why there are none, where nothing is to be quantized but bodies.
    """

    model: ir.Model
    settings: Settings
    reader: Any
    choose: Choose
    known: dict[str, Statistics] | None
    bodies: FloatBodies
    quantized: QuantizedLayers | NothingToQuantizeError


def convert(
    model: ir.Model,
    settings: Settings,
    reader: Any,
    identity: str = "",
    known: dict[str, Statistics] | None = None,
    *,
    choose: Choose,
) -> ir.Model:
    """Quantize a prepared model, which is changed and returned: `start`, then `complete`."""
    return complete(start(model, settings, reader, identity, known, choose=choose))


def start(
    model: ir.Model,
    settings: Settings,
    reader: Any,
    identity: str = "",
    known: dict[str, Statistics] | None = None,
    *,
    choose: Choose,
    besides: Besides | None = None,
) -> Written:
    """Calibrate a prepared model, which is changed, and write its codes.

    Args:
        model: The float model.
        settings: Those that `prepare` gave.
        reader: Calibration data.
        identity: Fingerprint of the model: before it was prepared, for the statistics file; as it is, for those in
            memory, or "" where it is not known.
        known: Statistics in memory by the fingerprint of what they are of, used and completed instead of a file.
        choose: What decides the rest, of the graph and of each body.
        besides: What else calibration of the graph takes, or took before; nothing of one that is simulated.

    Raises:
        NothingToQuantizeError: Neither in the graph nor in a body.
    """
    settings, reader = leave_joined_ends(model, settings, reader)
    if reader is not None and settings.algorithms:
        reader = repeatable(reader, model, settings)
        check_data(model, settings, reader)
    bodies = FloatBodies(model, settings)
    if settings.algorithms or settings.correct_biases or (bodies and settings.specs.bodies):
        reader = repeatable(reader, model, settings)
    quantized: QuantizedLayers | NothingToQuantizeError
    try:
        quantized = _write_graph(model, settings, reader, choose, identity, known, besides)
    except NothingToQuantizeError as error:
        if not bodies:
            raise
        quantized = error
    return Written(model, settings, reader, choose, known, bodies, quantized)


def complete(written: Written) -> ir.Model:
    """Correct biases, learn weights, and quantize the bodies where the settings say so, or where nothing else is.

    Raises:
        NothingToQuantizeError: Neither in the graph nor in a body.
    """
    model, settings, quantized = written.model, written.settings, written.quantized
    nothing = isinstance(quantized, NothingToQuantizeError)
    if isinstance(quantized, QuantizedLayers):
        own = quantized.decision.settings
        for step in (_correct, run_after) if learning_starts_corrected(own) else (run_after, _correct):
            step(quantized)
        run_passes(model, own.passes, on_quantized=True)
    if settings.specs.bodies or nothing:
        one, reader = partial(convert, choose=written.choose), repeatable(written.reader, model, settings)
        count = written.bodies.quantize(model, settings, reader, written.known, one)
        if isinstance(quantized, NothingToQuantizeError) and not count:
            raise quantized
        if nothing and not settings.specs.bodies:
            logger.info("Nothing is quantized but bodies of If, Loop and Scan: all else has nothing to quantize.")
        drop_unused_constants(model.graph)
    model.producer_name = "quark.onnx"
    return model


def finish(model: ir.Model, settings: Settings) -> None:
    """Make a quantized model what its file holds: constants of the same bits once, shapes only where none are inferred.

    Args:
        model: The model, changed in place.
        settings: Whether every tensor keeps its type and shape, and nodes constants of their own.
    """
    # A model whose nodes are to have initializers of their own keeps those of the same bits apart.
    if settings.passes.get(copy_shared_init.__name__) in (None, False):
        share_constants(model)
    if settings.value_infos:
        fill_value_infos(model, lambda names: run_random(model, names, settings))
    else:
        drop_inferable(model)


def _identity_of(model: ir.Model, before: str, changed: int, needed: bool) -> str:
    """The fingerprint of a model: statistics of simulated operators or rescaled layers are not those of the float one.

    Args:
        model: As it is.
        before: Its fingerprint before, or "".
        changed: In how many places it is another since.
        needed: Whether there has to be one.
    """
    return fingerprint(model) if (changed and before) or (needed and not before) else before


def _write_graph(
    model: ir.Model,
    settings: Settings,
    reader: Any,
    choose: Choose,
    identity: str,
    known: dict[str, Statistics] | None,
    besides: Besides | None,
) -> QuantizedLayers:
    """Write the codes of the nodes of a model, not those of its bodies."""
    data = reader if settings.algorithms or settings.correct_biases else None
    changed = run_before(model, settings, data)
    if reader is not None and needs_samples(model, settings):
        data = data or repeatable(reader, model, settings)
        reader = data
        if data is not None:
            measure_sizes(model, settings, data)
    changed += simulate(model, settings)
    identity = _identity_of(model, identity, changed, known is not None)
    statistics = None if known is None else known.setdefault(identity, Statistics(identity))
    form = choose(FloatForm(model, settings, reader, data, identity, statistics))
    settings = form.settings
    reference = model.clone()
    twins = dict(zip(model.graph, reference.graph, strict=True))
    if besides is None or (changed and (besides.outputs or besides.spread is not None)):
        besides = Besides()
    if form.reader is data:
        besides.want_means(wanted_means(model, settings), LinearMeans.of)
    decision = decide(model, settings, form.reader, identity, form.statistics, besides=besides)
    quantized = QuantizedLayers(decision, reference, data, besides)
    quantized.write(twins)
    return quantized


def _correct(quantized: QuantizedLayers) -> None:
    """Correct biases where the settings say that it is done unasked."""
    if not quantized.decision.settings.correct_biases:
        return
    if quantized.data is None:
        logger.info("Biases are not corrected for the mean error of their layers, which takes samples.")
        return
    count = correct_where_certain(quantized)
    logger.info("Biases corrected for the mean error of their layers: %d.", count)
