"""Retry: a model quantized once more, without some nodes, on the samples that were kept: what an advice is tried by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import onnx
import onnx_ir as ir

from quark.onnx.calibration.data.inputs import Feed, model_inputs
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.statistics import Statistics
from quark.onnx.config.settings import Settings
from quark.onnx.flow.flow import finish
from quark.onnx.flow.prepare import prepare
from quark.onnx.graph.model_file import checked_proto, load
from quark.onnx.search.lost_outputs.damage import damage
from quark.onnx.search.lost_outputs.verdict import Damage
from quark.onnx.search.settle import convert

CALIBRATED = 64
"""Samples that it calibrates on."""


class Retrying:
    """Quantizes a model without some nodes, as often as it is asked to; the model is calibrated once.

    Args:
        source: The float model, as `load` takes it.
        settings: Of the quantization that lost the outputs. Algorithms are left out: they would be run on each try.
        feeds: Samples.
    """

    def __init__(self, source: Any, settings: Settings, feeds: Sequence[Feed]) -> None:
        self._source, self._feeds = source, feeds
        calibration = replace(settings.calibration, statistics=None, range_file=None, figures=False)
        self._settings = replace(
            settings, calibration=calibration, algorithms=(), equalization=None, equalize_if_better=False,
            correct_biases=False, measurement=replace(settings.measurement, enabled=False), prepared_file=None,
        )  # fmt: skip
        self._known: dict[str, Statistics] = {}

    @cached_property
    def _prepared(self) -> tuple[ir.Model, Settings]:
        model = load(self._source)
        return model, prepare(model, self._settings)

    def __call__(self, names: frozenset[str]) -> tuple[onnx.ModelProto, Damage | None]:
        """The model with these nodes in float, and what is left of its outputs."""
        model, settings = self._prepared
        specs = replace(settings.specs, exclude=(*settings.specs.exclude, names))
        data = Samples(self._feeds[:CALIBRATED], model_inputs(model))
        quantized = convert(model.clone(), replace(settings, specs=specs), data, known=self._known)
        finish(quantized, settings)
        proto = checked_proto(quantized)
        return proto, damage(load(self._source), proto, self._feeds, settings)
