"""Cross-layer equalization that nobody asked for by name: kept where the quantized outputs are no worse by it.

    sqnr = 10 log10( sum(x^2) / sum((x - y)^2) )      x: a float output, y: that of the quantized model

over calibration samples; the worst output counts. Both models are quantized whole, algorithms after the scales apart:
equalized weights lose less, but the activations between them have other ranges, which may lose more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import onnx_ir as ir

from quark.base.log import logger
from quark.core.metrics import Metric
from quark.errors import NotSupportedError
from quark.onnx.algorithms.rescaling.cle import equalize
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.statistics import Statistics
from quark.onnx.config.algo_configs import CLEConfig
from quark.onnx.config.settings import Settings
from quark.onnx.search.evaluator import Evaluator, PartScorer

Convert = Callable[..., ir.Model]
"""`quark.onnx.flow.flow.convert`."""
SAMPLES = 32
"""Most samples that the two models are judged by, spread over all."""


def equalize_if_better(
    model: ir.Model,
    settings: Settings,
    data: Samples | None,
    convert: Convert,
    known: dict[str, Statistics] | None = None,
) -> tuple[Settings, ir.Model | None]:
    """Decide whether a model is equalized.

    Args:
        model: The float model, after `prepare`; not changed.
        settings: Those that `prepare` gave, `equalize_if_better` set.
        data: Calibration data; without any the model is left as it is.
        convert: What quantizes a model, in place.
        known: Statistics in memory by fingerprint, used and completed.

    Returns:
        The settings, decided; and the model quantized by them, where no other algorithm is still to run.
    """
    decided = replace(settings, equalize_if_better=False)
    plain = replace(decided, equalization=None)
    assert isinstance(settings.equalization, CLEConfig)
    pairs = equalize(model.clone(), settings.equalization, settings)
    # Ranges that a file has, or gets, are those of the model as it is.
    if data is None or settings.calibration.files or not pairs:
        return plain, None
    try:
        scorer = PartScorer(model, _spread(data), Metric("sqnr"), settings)
        evaluator = Evaluator(model, data, scorer, convert, known=known)
        # What is said of the layers of one model is true of the other.
        without, equalized = (
            evaluator.evaluate(replace(each, algorithms=()), told=each is plain and not settings.algorithms)
            for each in (plain, decided)
        )
    except NotSupportedError as error:
        logger.info("Not equalized, as the outputs cannot be compared: %s", error)
        return plain, None
    before, after = without.score, equalized.score
    kept = after >= before and not math.isnan(after)
    what = "kept" if kept else "left out"
    logger.info("Cross-layer equalization of %d pairs: SQNR %.2f -> %.2f dB: %s.", pairs, before, after, what)
    chosen, quantized = (decided, equalized) if kept else (plain, without)
    return chosen, None if settings.algorithms else quantized.model


def _spread(data: Samples) -> Samples:
    """At most SAMPLES of the samples, evenly spread."""
    count = min(len(data), SAMPLES)
    return data.part([i * len(data) // count for i in range(count)])
