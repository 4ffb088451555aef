"""settle: searches decide what settings leave open; the model is quantized by what they chose.

    equalize_if_better    the outputs of both models with their codes
    PRECISION             which node gets which element type
    MeasurePlacement      which nodes are the faster in integers on this machine

`flow.convert` has no search: it asks for a choice where the float model is as the algorithms leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from quark.base.log import logger
from quark.errors import NothingQualifiesError, NotSupportedError
from quark.onnx.algorithms import AFTER, BEFORE, check_data
from quark.onnx.calibration.besides import Besides, SampleOutputs
from quark.onnx.calibration.calibrate import repeatable
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.joined_ends import leave_joined_ends
from quark.onnx.calibration.statistics import Statistics, fingerprint
from quark.onnx.config.algo_configs import AutoMixprecisionConfig
from quark.onnx.config.settings import Settings
from quark.onnx.flow.flow import FloatForm, Written, complete, start
from quark.onnx.flow.prepare import prepare
from quark.onnx.search.change import Situation
from quark.onnx.search.equalize_if_better import equalize_if_better
from quark.onnx.search.latency.measure import leave_slower_in_float
from quark.onnx.search.mixed_precision.auto_mixprecision import mix_precision
from quark.onnx_ops.saving import save

PRECISION: dict[type[Any], Callable[[ir.Model, Any, Settings, Samples | None, Statistics], Settings]] = {
    AutoMixprecisionConfig: mix_precision,
}
"""Config of an algorithm -> what returns other settings; statistics are read, and completed."""


def check_algorithms(algorithms: Sequence[Any]) -> None:
    """Raise NotSupportedError for algorithms that this version does not have, before any work is done."""
    present = {**BEFORE, **PRECISION, **AFTER}
    missing = [type(algorithm).__name__ for algorithm in algorithms if type(algorithm) not in present]
    if missing:
        possible = ", ".join(kind.__name__ for kind in present)
        raise NotSupportedError(f"{', '.join(missing)}: not part of this version. Possible: {possible}.")


def quantize(model: ir.Model, settings: Settings, reader: Any = None, outputs: SampleOutputs | None = None) -> ir.Model:
    """Quantize a float model, which is changed; the quantized one may be another. See `convert`.

    `outputs` takes those of the float model, where calibration runs it over the samples as it is.
    """
    identity = fingerprint(model) if settings.calibration.statistics else ""
    prepared = prepare(model, settings)
    if settings.prepared_file is not None:
        save(model.clone(), settings.prepared_file)
    return convert(model, prepared, reader, identity, outputs=outputs)


def convert(
    model: ir.Model,
    settings: Settings,
    reader: Any,
    identity: str = "",
    known: dict[str, Statistics] | None = None,
    outputs: SampleOutputs | None = None,
) -> ir.Model:
    """Quantize a prepared model, which is changed and returned; with calibration data another one may be.

    The arguments are those of `flow.convert` and `quantize`. Settings may leave open what searches decide.
    """
    if settings.equalize_if_better:
        settings, reader = leave_joined_ends(model, settings, reader)
        if reader is not None:
            reader = repeatable(reader, model, settings)
            check_data(model, settings, reader)
        settings, written = equalize_if_better(model, settings, reader, start_as_chosen, known, outputs)
        if written is not None:
            return complete(written)
    return complete(start_as_chosen(model, settings, reader, identity, known, Besides(spread=outputs)))


def start_as_chosen(
    model: ir.Model,
    settings: Settings,
    reader: Any,
    identity: str = "",
    known: dict[str, Statistics] | None = None,
    besides: Besides | None = None,
) -> Written:
    """Write the codes of a prepared model; the arguments are those of `flow.start`."""
    return start(model, settings, reader, identity, known, choose=choose, besides=besides)


def choose(form: FloatForm) -> FloatForm:
    """The same with settings in which nothing is open.

    Raises:
        NothingQualifiesError: No layer takes part in a choice of element types, and the settings do not allow that.
        SlowerThanFloatError: No choice of kernels is faster than float.
    """
    settings, reader, statistics = form.settings, form.reader, form.statistics
    mixing = [_mixing(one) for one in settings.algorithms if type(one) in PRECISION]
    if mixing and statistics is None and not settings.calibration.files:
        statistics = Statistics(form.identity)
    known = {form.identity: statistics or Statistics(form.identity)}
    situation = Situation(settings, model=form.model, identity=form.identity, data=form.data, known=known)
    for change in mixing:
        try:
            settings = change(settings, situation)
        except NothingQualifiesError as error:
            if not settings.allow_noop:
                raise
            logger.warning("%s", error)
    if settings.measurement.enabled:
        reader = repeatable(reader, form.model, settings)
        settings = leave_slower_in_float(settings, replace(situation, data=reader))
    return replace(form, settings=settings, reader=reader, statistics=statistics)


def _mixing(config: Any) -> Callable[[Settings, Situation], Settings]:
    """The change of an algorithm that chooses element types."""

    def change(settings: Settings, situation: Situation) -> Settings:
        assert situation.model is not None
        known = situation.known[situation.identity]
        return PRECISION[type(config)](situation.model, config, settings, situation.data, known)

    return change
