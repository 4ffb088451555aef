"""The score of a quantized model: one number, from its outputs for samples that it was not made with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.core.metrics import Comparison, Metric, is_distribution, logits_of, scores_of
from quark.errors import NotSupportedError
from quark.onnx.calibration.calibrate import model_session
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.float_outputs import FloatOutputs
from quark.onnx.config.settings import Settings
from quark.onnx.graph.output_parts import SILENT, OutputPart, output_parts

FLOATS = ("FLOAT", "FLOAT16", "DOUBLE")
LOST, SCORES_LOST = 25.0, 30.0
"""dB: below it, tasks begin to suffer; where outputs are scores to decide by, earlier.

A text recognizer reads 84 % of 96 lines as in float where its scores keep 24.5 dB, and 94 % at 30.7 dB.
"""


Judge = Callable[[OutputPart, NumpyArray, NumpyArray], tuple[NumpyArray, NumpyArray]]
"""A part of the float output and the same of another model -> what both are compared by."""


def float_outputs(model: ir.Model) -> list[str]:
    """The names of the float outputs of a model. Raises NotSupportedError where there is none."""
    names = [
        value.name or "" for value in model.graph.outputs if value.dtype is not None and value.dtype.name in FLOATS
    ]
    if not names:
        raise NotSupportedError("The model has no float output, so there is nothing to judge quantized models by.")
    return names


def same_shape(name: str, expected: NumpyArray, array: NumpyArray) -> None:
    """Raise NotSupportedError where an output has another shape than that of the float model."""
    if expected.shape != array.shape:
        raise NotSupportedError(
            f"The output {name} is {list(array.shape)} instead of {list(expected.shape)}: its shape follows from "
            "values, so that quantized models cannot be judged by it."
        )


class Scorer:
    """Scores models by what they give beside what the float model gives; each part of an output for itself.

    Args:
        reference: The float model, run once.
        data: The samples.
        metric: Of each part of a float output (`graph/output_parts.py`) over all samples; the worst counts.
        settings: The execution providers.
        by_scores: Judge a part that is a distribution, or of probabilities, by its scores: see `core/metrics.py`.

    Attributes:
        scored: Parts that were judged so.

    Raises:
        NotSupportedError: The model has no float output.
    """

    def __init__(
        self, reference: ir.Model, data: Samples, metric: Metric, settings: Settings, by_scores: bool = False
    ) -> None:
        self.metric, self._by_scores, self.scored = metric, by_scores, set[OutputPart]()
        names, parts = float_outputs(reference), output_parts(reference)
        self._parts = [parts[name] for name in names]
        self.expected = FloatOutputs(reference, names, data, lambda model: model_session(model, [], settings))
        self._centers: dict[OutputPart, float] = {}

    def score(self, model: ir.Model) -> tuple[float, OutputPart]:
        """The metric and the worst part of an output.

        Raises:
            NotSupportedError: The shape of an output follows from values.
        """
        comparisons = {part: Comparison() for parts in self._parts for part in parts}
        for outputs in self.expected.beside(model):
            for parts, (expected, array) in zip(self._parts, outputs, strict=True):
                same_shape(parts[0].tensor, expected, array)
                for part in parts:
                    with np.errstate(invalid="ignore", over="ignore"):
                        comparisons[part].update(*self.judged(part, part.of(expected), part.of(array)))
        values = {part: self.metric.of(comparison) for part, comparison in comparisons.items()}
        worst = self.metric.worst_of(values)
        return values[worst], worst

    def is_lost(self, score: float, part: OutputPart) -> bool:
        """Whether a score tells that the task suffers; only the SQNR in dB does."""
        return self.metric.name == "sqnr" and score < (SCORES_LOST if part in self.scored else LOST)

    @cached_property
    def silent(self) -> bool:
        """Whether a part that is judged as probabilities holds no event: what ranges do to one is then not known."""
        parts = [part for parts in self._parts for part in parts if part.bounded]
        return self._by_scores and self.metric.name == "sqnr" and any(self._peak(part) < SILENT for part in parts)

    def _peak(self, part: OutputPart) -> float:
        return max((float(part.of(array).max(initial=0)) for array in self.expected.arrays(part.tensor)), default=0.0)

    def judged(self, part: OutputPart, expected: NumpyArray, array: NumpyArray) -> tuple[NumpyArray, NumpyArray]:
        """What a part of the float output and that of another model are compared by: themselves, or their scores."""
        if not self._by_scores or not (part.bounded or is_distribution(expected)):
            return expected, array
        self.scored.add(part)
        if is_distribution(expected):
            return scores_of(expected, array)
        center = self._center(part)
        x, y = logits_of(expected, array)
        return x - center, y - center

    def _center(self, part: OutputPart) -> float:
        """The mean score of a part over all samples; 0 where its scores are all alike, and nothing is left beside it.

        How far the scores of silence lie from those of an event is no signal: it is the same in every sample.
        """
        if part not in self._centers:
            arrays = (part.of(array) for array in self.expected.arrays(part.tensor))
            scores = np.concatenate([logits_of(array, array)[0].ravel() for array in arrays])
            self._centers[part] = float(scores.mean()) if np.ptp(scores) else 0.0
        return self._centers[part]
