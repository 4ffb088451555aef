"""settle: searches decide what settings leave open; the model is quantized by what they chose.

    equalize_if_better    the outputs of both models with their codes
    PRECISION             which node gets which element type
    MeasurePlacement      which nodes are the faster in integers on this machine

`flow.start` has no search: it calls `choose` where the float model is as the algorithms leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from quark.base.log import logger
from quark.errors import NothingQualifiesError, NotSupportedError
from quark.onnx.algorithms import AFTER, BEFORE, check_data
from quark.onnx.calibration.byproducts import Byproducts, SampleOutputs
from quark.onnx.calibration.calibrate import repeatable
from quark.onnx.calibration.front_ends import leave_ends
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.calibration.statistics import Statistics, fingerprint
from quark.onnx.config.algo_configs import AutoMixprecisionConfig
from quark.onnx.config.settings import Settings
from quark.onnx.flow.flow import Written, complete, start
from quark.onnx.flow.prepare import prepare
from quark.onnx.search.equalize_if_better import equalize_if_better
from quark.onnx.search.latency.measure import leave_slower_in_float
from quark.onnx.search.mixed_precision.auto_mixprecision import mix_precision
from quark.onnx_ops.saving import save

PRECISION: dict[type[Any], Callable[[Prepared, Any, Settings], Settings]] = {AutoMixprecisionConfig: mix_precision}
"""Config of an algorithm -> returns other settings; statistics of the model are read, and completed."""


def check_algorithms(algorithms: Sequence[Any]) -> None:
    """Raise NotSupportedError for algorithms that this version does not have, before any work is done."""
    present = {**BEFORE, **PRECISION, **AFTER}
    missing = [type(algorithm).__name__ for algorithm in algorithms if type(algorithm) not in present]
    if missing:
        possible = ", ".join(kind.__name__ for kind in present)
        raise NotSupportedError(f"{', '.join(missing)}: not part of this version. Possible: {possible}.")


def quantize(model: ir.Model, settings: Settings, data: Any = None, outputs: SampleOutputs | None = None) -> ir.Model:
    """Quantize a float model, as `quantize_as_decided` does; return the quantized model alone."""
    return quantize_as_decided(model, settings, data, outputs)[0]


def quantize_as_decided(
    model: ir.Model, settings: Settings, data: Any = None, outputs: SampleOutputs | None = None
) -> tuple[ir.Model, Settings]:
    """Quantize a float model, which is changed; the quantized one may be another. See `convert`.

    Args:
        model: The float model.
        settings: Those that were asked for.
        data: Calibration data.
        outputs: Takes the outputs of the float model, where calibration runs it over the samples as it is.

    Returns:
        The model, and the settings that were asked for with its equalization decided.
    """
    identity = fingerprint(model) if settings.calibration.statistics else ""
    asked, settings = settings, prepare(model, settings)
    if settings.prepared_file is not None:
        save(model.clone(), settings.prepared_file)
    quantized, found = _converted(Prepared(model, data, identity, byproducts=Byproducts(all_outputs=outputs)), settings)
    return quantized, replace(asked, equalize_if_better=False, equalization=found.equalization)


def convert(prepared: Prepared, settings: Settings) -> ir.Model:
    """Quantize a prepared model, which is changed and returned; with calibration data another one may be.

    Args:
        prepared: The float model.
        settings: Those that `prepare` gave; searches decide what they leave open.
    """
    return _converted(prepared, settings)[0]


def _converted(prepared: Prepared, settings: Settings) -> tuple[ir.Model, Settings]:
    """The quantized model, and the settings with its equalization decided."""
    written: Written | None = None
    if settings.equalize_if_better:
        prepared, settings = leave_ends(prepared, settings)
        if prepared.data is not None:
            data = repeatable(prepared.data, prepared.model, settings)
            assert data is not None
            check_data(prepared.model, settings, data)
            prepared = replace(prepared, data=data)
        settings, written = equalize_if_better(prepared, settings, start_as_chosen)
    return complete(written or start_as_chosen(prepared, settings), convert), settings


def start_as_chosen(prepared: Prepared, settings: Settings) -> Written:
    """Write the codes of a prepared model, by what searches choose where the settings leave something open."""
    return start(prepared, settings, choose)


def choose(prepared: Prepared, settings: Settings) -> tuple[Prepared, Settings]:
    """The model with the statistics that were made, and settings in which nothing is open.

    Args:
        prepared: The float model as the algorithms leave it.
        settings: Of it.

    Raises:
        NothingQualifiesError: No layer takes part in a choice of element types, and the settings do not allow that.
        SlowerThanFloatError: No choice of kernels is faster than float.
    """
    mixing = [one for one in settings.algorithms if type(one) in PRECISION]
    if mixing:
        own = {prepared.identity: prepared.own_statistics or Statistics(prepared.identity)}
        if prepared.statistics is None and not settings.calibration.files:
            prepared = replace(prepared, statistics=own)
        alone = replace(prepared, statistics=own, byproducts=Byproducts())
        for config in mixing:
            try:
                settings = PRECISION[type(config)](alone, config, settings)
            except NothingQualifiesError as error:
                if not settings.allow_noop:
                    raise
                logger.warning("%s", error)
    if settings.measurement.enabled:
        prepared = replace(prepared, data=repeatable(prepared.data, prepared.model, settings))
        settings = leave_slower_in_float(prepared, settings)
    return prepared, settings
