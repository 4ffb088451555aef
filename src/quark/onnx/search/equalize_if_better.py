"""Cross-layer equalization that nobody asked for by name: kept where the quantized outputs are no worse by it.

    sqnr = 10 log10( sum(x^2) / sum((x - y)^2) )      x: a float output, y: that of the quantized model

over calibration samples; the worst output counts. Both models have their codes, before biases are corrected and
algorithms learn: equalized weights lose less, but the activations between them have other ranges, which may lose more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import onnx_ir as ir

from quark.base.log import logger, severity
from quark.core.array import NumpyArray
from quark.core.metrics import Metric
from quark.errors import NotSupportedError
from quark.onnx.algorithms.rescaling.cle import Pair, equalized_pairs
from quark.onnx.calibration.besides import Besides, Channels, SampleOutputs
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.statistics import Statistics
from quark.onnx.config.algo_configs import CLEConfig
from quark.onnx.config.settings import Settings
from quark.onnx.flow.flow import Written
from quark.onnx.search.evaluator import PartScorer, float_outputs

Start = Callable[..., Written]
"""`quark.onnx.flow.flow.start`, its choice decided."""
SAMPLES = 32
"""Most samples that the two models are judged by, spread over all."""


def equalize_if_better(
    model: ir.Model,
    settings: Settings,
    data: Samples | None,
    start: Start,
    known: dict[str, Statistics] | None = None,
    outputs: SampleOutputs | None = None,
) -> tuple[Settings, Written | None]:
    """Decide whether a model is equalized.

    Args:
        model: The float model, after `prepare`; not changed.
        settings: Those that `prepare` gave, `equalize_if_better` set.
        data: Calibration data; without any the model is left as it is.
        start: What writes the codes of a model, in place.
        known: Statistics in memory by fingerprint, used and completed.
        outputs: What takes those of the model as it is.

    Returns:
        The settings, decided; and the codes written by them, where no other algorithm was to run before.
    """
    decided = replace(settings, equalize_if_better=False)
    plain = replace(decided, equalization=None)
    assert isinstance(settings.equalization, CLEConfig)
    pairs = equalized_pairs(model.clone(), settings.equalization, settings)
    # Ranges that a file has, or gets, are those of the model as it is.
    if data is None or settings.calibration.files or not pairs:
        return plain, None
    candidates = {equalized: replace(each, algorithms=()) for equalized, each in ((False, plain), (True, decided))}
    try:
        written, (before, after) = _compare(
            model, data, candidates, pairs, start, known, bool(settings.algorithms), outputs
        )
    except NotSupportedError as error:
        logger.info("Not equalized, as the outputs cannot be compared: %s", error)
        return plain, None
    kept = after >= before and not math.isnan(after)
    what = "kept" if kept else "left out"
    logger.info("Cross-layer equalization of %d pairs: SQNR %.2f -> %.2f dB: %s.", len(pairs), before, after, what)
    return decided if kept else plain, None if settings.algorithms else written[kept]


def _compare(
    model: ir.Model,
    data: Samples,
    candidates: dict[bool, Settings],
    pairs: Sequence[tuple[Pair, NumpyArray]],
    start: Start,
    known: dict[str, Statistics] | None,
    muted: bool,
    outputs: SampleOutputs | None,
) -> tuple[dict[bool, Written], list[float]]:
    """Write the codes of both candidates, with one pass of the float model over the data; score both.

    Args:
        model, data, start, known, outputs: As above.
        candidates: Whether equalized -> the settings.
        pairs: What the equalization does.
        muted: Whether nothing is said of layers.

    Raises:
        NotSupportedError: The outputs cannot be compared.
    """
    positions, settings = _spread(data), candidates[False]
    rescaled = {
        value.name or "": Channels(axis, scale) for pair, scale in pairs for value, axis in pair.between if axis
    }
    besides = Besides(samples=positions, outputs=float_outputs(model), spread=outputs, rescaled=rescaled)
    written = {}
    for equalized, each in candidates.items():
        # What is said of the layers of one model is true of the other.
        with severity(2 if equalized or muted else None):
            taken = besides.of_equalized() if equalized else besides
            written[equalized] = start(model.clone(), each, data, "", known, taken)
    given = besides.kept if besides.has_outputs else None
    scorer = PartScorer(model, data.part(positions), Metric("sqnr"), settings, given=given)
    return written, [scorer.score(made.model)[0] for made in written.values()]


def _spread(data: Samples) -> list[int]:
    """The positions of at most SAMPLES of the samples, evenly spread."""
    count = min(len(data), SAMPLES)
    return [i * len(data) // count for i in range(count)]
