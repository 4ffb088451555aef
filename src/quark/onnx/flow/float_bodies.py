"""FloatBodies: the bodies of If, Loop and Scan, each quantized as a model of its own.

Its calibration data are what the body reads when the float model around it runs; bodies within it come after it. What
no calibration sample runs stays in float, where ranges are needed: nothing says which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import onnx_ir as ir

from quark.base.log import logger
from quark.errors import CalibrationError, NothingToQuantizeError, QuarkError
from quark.onnx.calibration.data.readers import is_alive
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.statistics import Statistics, fingerprint
from quark.onnx.config.settings import Settings
from quark.onnx.flow.body_feeds import BodyFeeds
from quark.onnx.flow.body_model import Body, as_model, bodies_of, put_back
from quark.onnx.flow.prepare import prepare_body
from quark.onnx.graph.scopes import nodes_of

Convert = Callable[[ir.Model, Settings, Any, str, dict[str, Statistics] | None], ir.Model]
"""Quantizes a prepared model: `flow.convert`, which calls this."""


class FloatBodies:
    """The bodies of a model, beside a copy of the float model, whose nodes give them their data.

    Args:
        model: The float model; what becomes of it later does not change the copy.
        settings: Which nodes stay in float, and so do their bodies.
    """

    def __init__(self, model: ir.Model, settings: Settings) -> None:
        bodies = bodies_of(model.graph)
        excluded = nodes_of(settings.specs.exclude, model, "exclude", bodies=True) if bodies else set[ir.Node]()
        self._float = model.clone() if bodies else model
        twins = bodies_of(self._float.graph)
        self._pairs = [(body, twin) for body, twin in zip(bodies, twins, strict=True) if body.node not in excluded]

    def __len__(self) -> int:
        return len(self._pairs)

    def quantize(
        self,
        model: ir.Model,
        settings: Settings,
        data: Samples | None,
        known: dict[str, Statistics] | None,
        convert: Convert,
    ) -> int:
        """Quantize them within a model.

        Args:
            model: What became of the model; changed in place.
            settings: Those of the model.
            data: Calibration data of the model; None where there are none.
            known: Statistics in memory; see `flow.convert`.
            convert: Quantizes a body as a model.

        Returns:
            How many were quantized.
        """
        count = 0
        for body, twin in self._pairs:
            if body.node.graph is None:
                continue  # nothing reads what the node gives
            copied = as_model(twin, self._float)
            feeds = None if data is None else BodyFeeds(self._float, twin, data, settings)
            if _quantized(copied.model, twin, feeds, settings, known, convert):
                put_back(body, twin, copied, model)
                count += 1
        return count


def _quantized(
    model: ir.Model,
    body: Body,
    feeds: BodyFeeds | None,
    settings: Settings,
    known: dict[str, Statistics] | None,
    convert: Convert,
) -> bool:
    """Quantize a body as a model, in place; return whether there was anything, and data for it."""
    own = _settings(settings, body)
    first = None if feeds is None else next(iter(feeds), None)
    for value in model.graph.inputs:
        if value.type is None and first is not None:
            value.type = ir.TensorType(ir.DataType.from_numpy(first[value.name or ""].dtype))
    identity = fingerprint(model) if own.calibration.statistics else ""
    try:
        prepare_body(model, own)
        convert(model, own, None if first is None else feeds, identity, known)
    except NothingToQuantizeError:
        return False
    except QuarkError as error:
        why = _why_without_data(feeds, settings, own) if isinstance(error, CalibrationError) else None
        if why is None:
            raise type(error)(f"{body}: {error}") from error
        logger.warning("%s stays in float: %s.", body, why)
        return False
    return True


def _why_without_data(feeds: BodyFeeds | None, settings: Settings, own: Settings) -> str | None:
    """Why a body has no calibration data, by no fault of the data; None where it has some, or should have."""
    if feeds is None:
        return "there are no statistics of it" if _never_seen(settings, own) else None
    if next(iter(feeds), None) is None:
        return "no calibration sample runs it"
    # An initial state is zero in every sample of a model that is used step by step.
    return None if any(map(is_alive, feeds)) else "all that it reads is zero in the calibration samples"


def _never_seen(settings: Settings, own: Settings) -> bool:
    """Whether statistics were written for the graph around a body, and none for it, as no sample ran it."""
    around, inside = settings.calibration.statistics, own.calibration.statistics
    return around is not None and inside is not None and Path(around).exists() and not Path(inside).exists()


def _settings(settings: Settings, body: Body) -> Settings:
    """The settings of a body: as those around it, files of calibration apart."""
    calibration = replace(
        settings.calibration,
        samples=None,
        random_data=False,
        statistics=_beside(settings.calibration.statistics, body),
        range_file=_beside(settings.calibration.range_file, body),
    )
    specs = replace(settings.specs, bodies=True, is_body=True)
    # Presets and scripts name algorithms for all: not each body has something for them.
    return replace(settings, specs=specs, calibration=calibration, allow_noop=True)


def _beside(path: str | None, body: Body) -> str | None:
    """The file of a body beside that of the graph around it: bodies may have tensors of the same names."""
    if path is None:
        return None
    file = Path(path)
    return str(file.with_name(f"{file.stem}.{quote(str(body), safe='')}{file.suffix}"))
