"""rival: the model that is made without samples, which one made with them has to be better than.

Static integers lose what inputs quantized as they come, or weights alone, keep: they are worth it where they win time.
So the rival wins where it is the more exact, and

    time of the rival <= (1 + WON) * time of the other          bytes of the rival <= (1 + MORE) * bytes of the other

Both times are those of the whole file beside the float model, on one sample.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import onnx_ir as ir

from quark.errors import QuarkError
from quark.log import logger, severity
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.score import Scorer
from quark.onnx.config.settings import Settings
from quark.onnx.flow import convert, finish
from quark.onnx.graph.model_file import load, read, to_proto
from quark.onnx.latency.measure import leave_slower_in_float
from quark.onnx.latency.whole_file import file_ratio
from quark.onnx.parts.output_parts import OutputPart
from quark.onnx.prepare import prepare
from quark.onnx_ops.saving import PROTOBUF_LIMIT, weight_bytes

WON, MORE = 0.05, 0.02
"""Share of the time that static integers have to win: sessions of one file differ by 0.03. Share of the bytes."""


@dataclass(frozen=True)
class ScoredModel:
    """A quantized model.

    Attributes:
        settings: What it was made by.
        model: The model.
        score: The metric of the worst part of its outputs.
        output: That part.
        seconds: What quantizing and measuring took.
    """

    settings: Settings
    model: ir.Model
    score: float
    output: OutputPart
    seconds: float


class Rival:
    """A model that is made without samples.

    Args:
        source: The float model, as `load` takes it.
        settings: Of dynamic quantization, or of weights alone.
    """

    def __init__(self, source: Any, settings: Settings) -> None:
        self._source, self._settings = source, settings
        self._scored: ScoredModel | None = None
        self._costs: tuple[float, int] | None = None
        self._given_up = False

    def instead_of(self, other: ScoredModel, scorer: Scorer, data: Samples) -> ScoredModel | None:
        """The rival where it is the better one; None where it is not, or cannot be made or run.

        Args:
            other: What was made with samples.
            scorer: What both are scored by.
            data: Calibration samples, of which the first is run.
        """
        if self._given_up:
            return None
        try:
            scored = self._made(scorer, data)
            if not scorer.metric.better(scored.score, other.score):
                return None
            if self._costs is None:
                self._costs = self._cost(scored, data[0])
            seconds, size = self._cost(other, data[0])
        except QuarkError as error:
            logger.info("Nothing that is made without samples is compared: %s", error)
            self._given_up = True
            return None
        wins = self._costs[0] <= (1 + WON) * seconds and self._costs[1] <= (1 + MORE) * size
        metric = scorer.metric
        logger.info(
            f"Made without samples: {metric.text(scored.score)}, time / float {self._costs[0]:.2f}, {self._costs[1]} "
            f"bytes; with: {metric.text(other.score)}, {seconds:.2f}, {size} bytes: {'first' if wins else 'second'}."
        )
        return scored if wins else None

    def _made(self, scorer: Scorer, data: Samples) -> ScoredModel:
        if self._scored is None:
            start = time.monotonic()
            with severity(2):
                model = load(self._source)
                settings = prepare(model, self._settings)
                if settings.measurement.enabled:
                    settings = leave_slower_in_float(model, settings, data)
                    settings = replace(settings, measurement=replace(settings.measurement, enabled=False))
                model = convert(model, settings, data)
            self._scored = ScoredModel(settings, model, *scorer.score(model), time.monotonic() - start)
        return self._scored

    @cached_property
    def _float(self) -> ir.Model:
        return read(self._source)

    def _cost(self, scored: ScoredModel, feed: Feed) -> tuple[float, int]:
        """Time beside the float model, and bytes."""
        if weight_bytes(scored.model) >= PROTOBUF_LIMIT:
            raise QuarkError("a model over 2 GB is not run from memory.")
        model = scored.model.clone()
        finish(model, scored.settings)
        proto = to_proto(model)
        return file_ratio(self._float, proto, feed, scored.settings.measurement.threads).ratio, proto.ByteSize()
