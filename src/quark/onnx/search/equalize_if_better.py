"""Cross-layer equalization that nobody asked for by name: kept where the quantized outputs are no worse by it.

    sqnr = 10 log10( sum(x^2) / sum((x - y)^2) )      x: a float output, y: that of the quantized model

over calibration samples; the worst output counts. Both models have their codes, before biases are corrected and
algorithms learn: equalized weights lose less, but the activations between them have other ranges, which may lose more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from quark.base.log import logger, severity
from quark.core.array import NumpyArray
from quark.core.metrics import Metric
from quark.errors import ConfigError, NotSupportedError
from quark.onnx.algorithms.rescaling.cle import Pair, equalized_pairs
from quark.onnx.calibration.byproducts import Byproducts, Channels
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.algo_configs import CLEConfig
from quark.onnx.config.settings import Settings
from quark.onnx.flow.flow import Written
from quark.onnx.search.evaluator import PartScorer, float_outputs

Start = Callable[[Prepared, Settings], Written]
"""Writes the codes of a model, which is changed."""
SAMPLES = 32
"""Most samples that the outputs of the two models are compared on, spread over all."""


def equalize_if_better(prepared: Prepared, settings: Settings, start: Start) -> tuple[Settings, Written | None]:
    """Decide whether a model is equalized.

    Args:
        prepared: The float model, not changed. Its data are `Samples`; without any the model is left as it is.
        settings: Those that `prepare` gave, `equalize_if_better` set.
        start: Writes the codes of a copy.

    Returns:
        The settings, decided; and the codes written by them, where no other algorithm was to run before.
    """
    assert isinstance(settings.equalization, CLEConfig)
    decided = replace(settings, equalize_if_better=False)
    plain = replace(decided, equalization=None)
    # Ranges that a file has, or gets, are those of the model as it is.
    if prepared.data is None or settings.calibration.files:
        return plain, None
    for config in (settings.equalization, replace(settings.equalization, cle_through_gates=False)):
        pairs = equalized_pairs(prepared.model.clone(), config, settings)
        if not pairs:
            break
        chosen, written = _better(prepared, plain, replace(decided, equalization=config), pairs, start)
        if chosen is not plain or not any(pair.is_gated for pair, _ in pairs):
            return chosen, written
    return plain, None


def _better(
    prepared: Prepared, plain: Settings, decided: Settings, pairs: Sequence[tuple[Pair, NumpyArray]], start: Start
) -> tuple[Settings, Written | None]:
    """The better of the settings without and with equalization, and what was written by them."""
    candidates = {equalized: replace(each, algorithms=()) for equalized, each in ((False, plain), (True, decided))}
    try:
        written, (before, after) = _compare(prepared, candidates, pairs, start, muted=bool(plain.algorithms))
    except NotSupportedError as error:
        logger.info("Not equalized, as the outputs cannot be compared: %s", error)
        return plain, None
    except ConfigError as error:
        # Of one of both: where it is the plain model, the same is said when that is quantized.
        logger.info("Not equalized over %d pairs: %s", len(pairs), error)
        return plain, None
    kept = after >= before and not math.isnan(after)
    gated = sum(pair.is_gated for pair, _ in pairs)
    through = f", {gated} of them through gates" if gated else ""
    verb = "kept" if kept else "left out"
    logger.info(
        "Cross-layer equalization of %d pairs%s: SQNR %.2f -> %.2f dB: %s.", len(pairs), through, before, after, verb
    )
    return decided if kept else plain, None if plain.algorithms else written[kept]


def _compare(
    prepared: Prepared,
    candidates: dict[bool, Settings],
    pairs: Sequence[tuple[Pair, NumpyArray]],
    start: Start,
    muted: bool,
) -> tuple[dict[bool, Written], list[float]]:
    """Write the codes of both candidates, with one pass of the float model over the data; score both.

    Args:
        prepared: The float model.
        candidates: Whether equalized -> the settings.
        pairs: The pairs of layers that are equalized, with their scales.
        start: Writes the codes of a copy.
        muted: Log nothing about layers.

    Raises:
        NotSupportedError: The outputs cannot be compared.
    """
    model, data, count = prepared.model, prepared.data, min(len(prepared.data), SAMPLES)
    positions = [i * len(data) // count for i in range(count)]
    rescaled = {
        value.name or "": Channels(axis, scale) for pair, scale in pairs for value, axis in pair.between if axis
    }
    byproducts = Byproducts(
        samples=positions, output_names=float_outputs(model),
        all_outputs=prepared.byproducts.all_outputs, rescaled=rescaled,
    )  # fmt: skip
    written = {}
    for equalized, settings in candidates.items():
        # The log of the layers of one model holds for the other.
        with severity(2 if equalized or muted else None):
            own = byproducts.of_equalized() if equalized else byproducts
            copy = replace(prepared, model=model.clone(), identity="", byproducts=own)
            written[equalized] = start(copy, settings)
    given = byproducts.outputs if byproducts.has_outputs else None
    scorer = PartScorer(model, data.part(positions), Metric("sqnr"), candidates[False], given=given)
    return written, [scorer.score(each.prepared.model)[0] for each in written.values()]
