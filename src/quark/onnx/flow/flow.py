"""The flow on one page: algorithms, choice, placement, calibration, writing; then all of it for bodies.

Searches are in `search/settle.py`, which calls `start` and `complete`: here is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
from quark.onnx.calibration.calibrate import repeatable, run_random
from quark.onnx.calibration.front_ends import leave_ends
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.settings import Settings
from quark.onnx.decide import decide
from quark.onnx.flow.float_bodies import Convert, FloatBodies
from quark.onnx.npu.averaged_sizes import measure_sizes, needs_samples
from quark.onnx.npu.simulation import simulate
from quark.onnx.passes import run_passes
from quark.onnx.passes.copy_shared_init import copy_shared_init
from quark.onnx.qdq.value_infos import fill_value_infos
from quark.onnx.qdq.write_qdq import drop_unused_constants
from quark.onnx_ops.compact import drop_inferable, share_constants

Choose = Callable[[Prepared, Settings], tuple[Prepared, Settings]]
"""(a float model as the algorithms leave it, its settings) -> the model, and settings that leave nothing open."""


@dataclass(frozen=True)
class Written:
    """A model as its codes were written: biases, weights and bodies are as they were.

    Attributes:
        prepared: The model, which runs, with its data.
        settings: Of it and of its bodies, as they were before anything was chosen.
        bodies: Those of the float model.
        quantized: The layers; why there are none, where nothing is to be quantized but bodies.
    """

    prepared: Prepared
    settings: Settings
    bodies: FloatBodies
    quantized: QuantizedLayers | NothingToQuantizeError


def start(prepared: Prepared, settings: Settings, choose: Choose) -> Written:
    """Calibrate a prepared model, which is changed, and write its codes.

    Args:
        prepared: The float model.
        settings: Those that `prepare` gave.
        choose: Chooses what the settings leave open.

    Raises:
        NothingToQuantizeError: Neither in the graph nor in a body.
    """
    prepared, settings = leave_ends(prepared, settings)
    model, bodies = prepared.model, FloatBodies(prepared.model, settings)
    if settings.algorithms or settings.correct_biases or (bodies and settings.specs.bodies):
        data = repeatable(prepared.data, model, settings)
        if prepared.data is not None and settings.algorithms and data is not None:
            check_data(model, settings, data)
        prepared = replace(prepared, data=data)
    quantized: QuantizedLayers | NothingToQuantizeError
    try:
        quantized = _write_graph(prepared, settings, choose)
    except NothingToQuantizeError as error:
        if not bodies:
            raise
        quantized = error
    return Written(prepared, settings, bodies, quantized)


def complete(written: Written, convert: Convert) -> ir.Model:
    """Correct biases, learn weights, and quantize the bodies where the settings say so, or where nothing else is.

    Args:
        written: The model, which is changed.
        convert: Quantizes a body as a model.

    Raises:
        NothingToQuantizeError: Neither in the graph nor in a body.
    """
    model, settings, quantized = written.prepared.model, written.settings, written.quantized
    nothing = isinstance(quantized, NothingToQuantizeError)
    if isinstance(quantized, QuantizedLayers):
        own = quantized.decision.settings
        for step in (_correct, run_after) if learning_starts_corrected(own) else (run_after, _correct):
            step(quantized)
        run_passes(model, own.passes, on_quantized=True)
    if settings.specs.bodies or nothing:
        data = repeatable(written.prepared.data, model, settings)
        count = written.bodies.quantize(replace(written.prepared, data=data), settings, convert)
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


def _write_graph(prepared: Prepared, settings: Settings, choose: Choose) -> QuantizedLayers:
    """Write the codes of the nodes of a model, not those of its bodies."""
    model, data = prepared.model, prepared.data
    repeats = bool(settings.algorithms or settings.correct_biases)
    changed = run_before(model, settings, data if repeats else None)
    if data is not None and needs_samples(model, settings):
        data = repeatable(data, model, settings)
        prepared = replace(prepared, data=data)
        if data is not None:
            measure_sizes(model, settings, data)
    changed += simulate(model, settings)
    prepared, settings = choose(prepared.changed(changed), settings)
    reference = model.clone()
    float_nodes = dict(zip(model.graph, reference.graph, strict=True))
    if repeats:
        if (known := prepared.own_statistics) is not None and not prepared.byproducts.means:
            prepared.byproducts.means = known.means
        prepared.byproducts.want_means(wanted_means(model, settings), LinearMeans.of)
    decision = decide(prepared, settings)
    quantized = QuantizedLayers(decision, reference, data if repeats else None, prepared.byproducts)
    quantized.write(float_nodes)
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
