"""evaluator: what quantized models give beside the float one, as one number of which searches make their choice.

    Evaluator         settings -> a model quantized by them, its score by a Scorer, its seconds: for every search
    PartScorer        a metric over all samples, of the worst part of the outputs, for recovery
    Scorer            any other measure of the outputs: a mean over samples of
    one_number        a metric's distance, or of KL, or what the user's function gives, for mixed precision
    mean_distance     a distance of all outputs of a sample as one vector x, y in float64, for automatic searches:

          AutoSearchPro            AutoSearch
L2        |x - y|                  mean (x - y)^2
L1        sum |x - y|              mean |x - y|
cos       1 - cosine               (1 - cosine) / 2
psnr      -10 log10(255^2 / mean (x - y)^2)
ssim      1 - (2 mx my + c1) (2 sx sy + c2) / ((mx^2 + my^2 + c1) (sx^2 + sy^2 + c2))     m: mean, s: deviation
          c1 = (0.01 * 255)^2, c2 = (0.03 * 255)^2

    OutputMetrics     cosine similarity and Euclidean (L2) distance of each float output, for EvalMetrics

The float model runs once (`calibration/float_outputs.py`), and any number of others are compared with what it gave.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from quark.base.log import severity
from quark.core.array import NumpyArray
from quark.core.metrics import Comparison, Metric, cosine, decibel, is_distribution, kl, logits_of, scores_of
from quark.errors import ConfigError, NonFiniteError, NotSupportedError, did_you_mean
from quark.onnx.calibration.calibrate import model_session
from quark.onnx.calibration.data.samples import Samples, Store
from quark.onnx.calibration.float_outputs import FloatOutputs
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.settings import Settings
from quark.onnx.graph.output_parts import SILENT, OutputPart, output_parts
from quark.onnx.search.sums import Decided, Sums, kept_decisions, share_kept, spread, total, worst_part

FLOATS = ("FLOAT", "FLOAT16", "DOUBLE")
LOST, SCORES_LOST = 25.0, 30.0
"""dB: below it, tasks begin to suffer; where the largest of many scores decides, earlier.

A text recognizer reads 84 % of 96 lines as in float where its scores keep 24.5 dB, and 94 % at 30.7 dB. Of scores that
are compared with a threshold, a text detector keeps 95 % of the pixels at 18.8 dB and 98.7 % at 29.0 dB, and a detector
of faces 96 % of the boxes at 23.6 dB and 99 % at 28.2 dB.
"""
SPARE = 5.0
"""dB above these: what is lost is then seldom felt."""
DECIDED, KEPT = 0.5, 0.999
"""The probability above which it is a yes; and the share of decisions as in float with which nothing is felt."""
FEW_KEPT = 0.95
"""Share of the decisions of a distribution below which its task suffers, whatever its dB."""


PartValues = Callable[[OutputPart, NumpyArray, NumpyArray], tuple[NumpyArray, NumpyArray]]
"""(part, values of the float model, values of another) -> the values by which both are compared."""


def float_outputs(model: ir.Model) -> list[str]:
    """The names of the float outputs of a model. Raises NotSupportedError where there is none."""
    names = [
        value.name or "" for value in model.graph.outputs if value.dtype is not None and value.dtype.name in FLOATS
    ]
    if not names:
        raise NotSupportedError("The model has no float output, so there is nothing to compare quantized models by.")
    return names


def _same_shape(name: str, expected: NumpyArray, array: NumpyArray) -> None:
    """Raise NotSupportedError where an output has another shape than that of the float model."""
    if expected.shape != array.shape:
        raise NotSupportedError(
            f"The output {name} is {list(array.shape)} instead of {list(expected.shape)}: its shape follows from "
            "values, so that quantized models cannot be compared by it."
        )


_Samplewise = Iterable[Sequence[tuple[NumpyArray, NumpyArray]]]
"""Of each sample, for each output: what the float model gave, and another."""
Measure = Callable[[_Samplewise], float]
"""The outputs of all samples -> the score of the model that gave the others; for searches, less is better."""


class Score(NamedTuple):
    """The score of a model.

    Attributes:
        value: It.
        part: The part of an output that it is of; None where it is of them all.
        sums: What it follows from; empty where it follows from something else.
        decided: The decisions of each sample.
    """

    value: float
    part: OutputPart | None
    sums: Sums = ()
    decided: Decided = ()


class Scorer:
    """Scores models by what they give beside what the float model gave.

    Args:
        expected: What it gave.
        measure: Makes one number of both.
    """

    def __init__(self, expected: FloatOutputs, measure: Measure) -> None:
        self.expected, self._measure = expected, measure

    def score(self, model: ir.Model, samples: range | None = None) -> Score:
        """The score of a model on some samples, None for all."""
        return self.of(self.expected.beside(model, samples))

    def of(self, outputs: _Samplewise) -> Score:
        """The score of the outputs of a model."""
        return Score(self._measure(outputs), None)


class PartScorer(Scorer):
    """Scores each part of an output for itself: the worst counts.

    Args:
        reference: The float model, run once.
        data: The samples.
        metric: Of each part of a float output (`graph/output_parts.py`) over all samples; the worst counts.
        settings: The execution providers.
        by_scores: Compare a part that is a distribution, or of probabilities, by its scores: see `core/metrics.py`.
        given: (sample, name) -> its float outputs; None to run the float model for them.
        strict: Whether tasks are taken to suffer below SCORES_LOST by any scores.

    Raises:
        NotSupportedError: The model has no float output.
    """

    def __init__(
        self,
        reference: ir.Model,
        data: Samples,
        metric: Metric,
        settings: Settings,
        by_scores: bool = False,
        given: Store | None = None,
        strict: bool = False,
    ) -> None:
        self.metric, self._by_scores, self._strict = metric, by_scores, strict
        names, parts = float_outputs(reference), output_parts(reference)
        self._parts = [parts[name] for name in names]
        self.expected = FloatOutputs(
            reference, names, data, lambda model: model_session(model, [], settings), given=given
        )
        self._samples = range(len(self.expected))
        self._centers: dict[OutputPart, float] = {}
        self._decided: tuple[ir.Model, float] | None = None

    def __len__(self) -> int:
        """How many samples models are scored on."""
        return len(self._samples)

    def on_last(self, count: int) -> PartScorer:
        """A scorer on the last of the samples; how a part is compared follows from all of them."""
        chosen = copy.copy(self)
        chosen._samples = self._samples[-count:]
        return chosen

    def on(self, reference: ir.Model, data: Samples, settings: Settings) -> PartScorer:
        """A scorer by the same measure, of other samples."""
        return PartScorer(reference, data, self.metric, settings, self._by_scores, strict=self._strict)

    def score(self, model: ir.Model, samples: range | None = None) -> Score:
        """The score of a model on some samples, None for those of the scorer."""
        return super().score(model, self._samples if samples is None else samples)

    def completed(self, made: ScoredModel, first: ir.Model | None = None) -> ScoredModel:
        """A model that was scored on the last samples alone, with the score on all.

        Args:
            made: The model, as a scorer `on_last` scored it.
            first: Gives the outputs of the other samples; None for the model itself.
        """
        others = range(len(self) - len(made.sums))
        sums, decided = self._sums(self.expected.beside(first or made.model, others))
        return made.with_score(self.over([*sums, *made.sums], [*decided, *made.decided]))

    def of(self, outputs: _Samplewise) -> Score:
        """The metric and the worst part of an output.

        Raises:
            NotSupportedError: The shape of an output follows from values.
        """
        return self.over(*self._sums(outputs))

    def _sums(self, outputs: _Samplewise) -> tuple[Sums, Decided]:
        """Sums and decisions of each sample. Raises NotSupportedError as `of` does."""
        sums: list[dict[OutputPart, Comparison]] = []
        decided: list[dict[OutputPart, tuple[float, int]]] = []
        for pairs in outputs:
            sums.append({part: Comparison() for parts in self._parts for part in parts})
            decided.append({})
            for parts, (expected, array) in zip(self._parts, pairs, strict=True):
                _same_shape(parts[0].tensor, expected, array)
                for part in parts:
                    with np.errstate(invalid="ignore", over="ignore"):
                        x, y = self.values(part, part.of(expected), part.of(array))
                        sums[-1][part].update(x, y)
                    if part in self._distributions and np.isfinite(y).all():
                        decided[-1][part] = kept_decisions(x, y)
        return sums, decided

    def over(self, sums: Sums, decided: Decided) -> Score:
        """The metric and the worst part of an output, of what is known of each sample."""
        value, worst = worst_part(self.metric, total(sums))
        return Score(value, worst, sums, decided)

    def is_lost(self, made: ScoredModel) -> bool:
        """True for a model with which tasks may suffer: an SQNR in dB below the bound; no other metric has one.

        The stricter bound holds for all scores where a model wins no time, as its weights alone are integers. What few
        samples tell badly counts as if it were as bad as it may be, unless there are decisions: these tell themselves
        whether too few are kept.
        """
        if self.metric.name != "sqnr":
            return False
        value = made.score if any(made.decided) else self.least(made)
        return value < self._bound(made) or share_kept(made.decided) < FEW_KEPT

    def is_far(self, made: ScoredModel, gain: float) -> bool:
        """True for a model with which tasks may suffer even where steps make its score better by so many dB."""
        return made.score + gain < self._bound(made)

    def _bound(self, made: ScoredModel) -> float:
        """The SQNR in dB below which tasks may suffer; other metrics have none."""
        if self.metric.name != "sqnr":
            return -math.inf
        strict = self._strict or made.settings.specs.weights_apart
        return SCORES_LOST if made.output in (self.scored if strict else self._distributions) else LOST

    def least(self, made: ScoredModel, new: bool = False) -> float:
        """The value that the metric has at least, as far as the samples tell (`sums.LEVEL`).

        Args:
            made: The model.
            new: Of as many other samples, whose figure has an error too; else of all that there are.
        """
        errors = math.sqrt(2) if new else 1.0
        return self.metric.at(self.metric.distance(made.score) + errors * spread(self.metric, made.sums))

    def is_plenty(self, made: ScoredModel) -> bool:
        """True where the loss of a model is seldom felt: by its SQNR, or by the decisions of scores that are kept."""
        if self.metric.name != "sqnr":
            return False
        least = self.least(made)
        if made.output not in self.scored:
            return least >= LOST + SPARE
        kept = least >= SCORES_LOST and share_kept(made.decided) >= KEPT
        return least >= SCORES_LOST + SPARE or (kept and self._decisions_kept(made.model) >= KEPT)

    def _decisions_kept(self, model: ir.Model) -> float:
        """The least share, over the parts that are compared by scores, of classes or of sides of a half as in float.

        Asked of one model again and again, until a step gives a better one: it runs once.
        """
        if self._decided is not None and self._decided[0] is model:
            return self._decided[1]
        same, count = Counter[OutputPart](), Counter[OutputPart]()
        for pairs in self.expected.beside(model, self._samples):
            for parts, (expected, array) in zip(self._parts, pairs, strict=True):
                for part in self.scored.intersection(parts):
                    x, y = part.of(expected), part.of(array)
                    decided = [each.argmax(-1) if is_distribution(x) else each > DECIDED for each in (x, y)]
                    same[part] += int((decided[0] == decided[1]).sum())
                    count[part] += decided[0].size
        self._decided = model, min((same[part] / count[part] for part in count), default=1.0)
        return self._decided[1]

    @cached_property
    def silent(self) -> bool:
        """True where a part that is compared as probabilities holds no event, so that nothing shows the loss of one."""
        parts = [part for parts in self._parts for part in parts if part.bounded]
        return (
            self._by_scores
            and self.metric.name == "sqnr"
            and any(
                max((float(part.of(array).max(initial=0)) for array in self.expected.arrays(part.tensor)), default=0.0)
                < SILENT
                for part in parts
            )
        )

    @cached_property
    def scored(self) -> frozenset[OutputPart]:
        """Parts that are compared by their scores, for one sample or more."""
        bounded = {part for parts in self._parts for part in parts if part.bounded and self._by_scores}
        return self._distributions | bounded

    @cached_property
    def _distributions(self) -> frozenset[OutputPart]:
        """Those of them that are distributions, for one sample or more."""
        if not self._by_scores:
            return frozenset()
        samples = self.expected.paired(zip(*map(self.expected.arrays, self.expected.names), strict=True))
        return frozenset(
            part
            for pairs in samples
            for parts, (expected, _) in zip(self._parts, pairs, strict=True)
            for part in parts
            if is_distribution(part.of(expected))
        )

    def values(self, part: OutputPart, expected: NumpyArray, array: NumpyArray) -> tuple[NumpyArray, NumpyArray]:
        """The values by which a part of the float output and that of another model are compared: they, or scores."""
        if not self._by_scores or not (part.bounded or is_distribution(expected)):
            return expected, array
        if is_distribution(expected):
            return scores_of(expected, array)
        if part not in self._centers:
            # How far the scores of silence lie from those of an event is no signal: it is the same in every sample.
            arrays = (part.of(array) for array in self.expected.arrays(part.tensor))
            scores = np.concatenate([logits_of(array, array)[0].ravel() for array in arrays])
            # Of scores that are all equal, nothing would be left beside their mean.
            self._centers[part] = float(scores.mean()) if np.ptp(scores) else 0.0
        x, y = logits_of(expected, array)
        return x - self._centers[part], y - self._centers[part]


@dataclass(frozen=True)
class ScoredModel:
    """A quantized model.

    Attributes:
        settings: What it was made by.
        model: The model.
        score: Of its outputs.
        output: The part of an output that it is of; None where it is of them all.
        seconds: What quantizing and measuring took.
        sums, decided: What the score follows from, of each sample; see `Score`.
    """

    settings: Settings
    model: ir.Model
    score: float
    output: OutputPart | None
    seconds: float
    sums: Sums = ()
    decided: Decided = ()

    def scored_by(self, scorer: Scorer) -> ScoredModel:
        """This model with the score on other samples."""
        return self.with_score(scorer.score(self.model))

    def with_score(self, found: Score) -> ScoredModel:
        """This model with another score."""
        return replace(self, score=found.value, output=found.part, sums=found.sums, decided=found.decided)


_Shortcut = Callable[[Settings, int], Iterable[Sequence[NumpyArray]] | None]
"""(settings, how many samples) -> the outputs of a model by them, which is not made; None where it has to be."""


@dataclass(frozen=True)
class Evaluator:
    """Quantizes one float model by any settings, on statistics of one pass over the data, and scores what that gives.

    Attributes:
        prepared: The float model, after `prepare`; not changed. Its data are `Samples`, whose clock counts, or None
            where settings need none.
        scorer: Scores what a model gives.
        convert: `quark.onnx.search.settle.convert`, or another function of the same arguments.
        shortcut: Gives the outputs of some models without making these.
    """

    prepared: Prepared
    scorer: Scorer
    convert: Callable[[Prepared, Settings], ir.Model]
    shortcut: _Shortcut | None = None

    def made(self, settings: Settings, told: bool = False) -> ir.Model:
        """Quantize; the arguments and errors are those of `evaluate`."""
        with severity(None if told else 2):
            return self.convert(self.prepared.copy(), settings)

    def evaluate(self, settings: Settings, told: bool = False) -> ScoredModel:
        """Quantize and score.

        Args:
            settings: What is quantized.
            told: Whether algorithms may tell of every layer.

        Raises:
            TimeUpError: The time of the data ends before the weights are decided.
            QuarkError: The settings do not fit the model.
        """
        clock = time.monotonic if self.prepared.data is None else self.prepared.data.clock
        start = clock()
        model = self.made(settings, told)
        found = self.scorer.score(model)
        return ScoredModel(settings, model, found.value, found.part, clock() - start, found.sums, found.decided)

    def score(self, settings: Settings, count: int | None = None) -> float:
        """The score alone, on the first samples; None for all."""
        expected = self.scorer.expected
        count = len(expected) if count is None else min(count, len(expected))
        outputs = None if self.shortcut is None else self.shortcut(settings, count)
        if outputs is None:
            samples = None if count is None else range(count)
            return self.scorer.score(self.convert(self.prepared.copy(), settings), samples)[0]
        return self.scorer.of(expected.paired(outputs))[0]


# EvalMetrics ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputMetrics:
    """The result of EvalMetrics, over all samples and float outputs.

    Attributes:
        mean_cosine, min_cosine: Cosine similarity; 1 where both are equal.
        mean_l2, max_l2: Euclidean distance, in the unit of the outputs.
        samples: How many samples were run.
    """

    mean_cosine: float
    min_cosine: float
    mean_l2: float
    max_l2: float
    samples: int

    def __str__(self) -> str:
        return (
            f"cosine similarity {self.mean_cosine:.6g} (worst {self.min_cosine:.6g}), "
            f"L2 distance {self.mean_l2:.6g} (worst {self.max_l2:.6g}), over {self.samples} samples"
        )


def output_metrics(reference: ir.Model, model: ir.Model, data: Samples, settings: Settings) -> OutputMetrics:
    """Run both models on the data.

    Args:
        reference: The float model.
        model: What was made of it.
        data: The samples.
        settings: The execution providers.

    Raises:
        NotSupportedError: The model has no float output, or one whose shape follows from values.
        NonFiniteError: An output of the quantized model holds NaN or Inf where that of the float model does not.
    """
    expected = FloatOutputs(reference, float_outputs(reference), data, lambda each: model_session(each, [], settings))
    cosines, distances = [], []
    for outputs in expected.beside(model):
        for name, (x, y) in zip(expected.names, outputs, strict=True):
            _same_shape(name, x, y)
            if not np.isfinite(y).all():
                raise NonFiniteError(
                    f"EvalMetrics: the output {name} holds NaN or Inf, which the float model's does not."
                )
            comparison = Comparison().update(x, y)
            cosines.append(comparison.cosine)
            distances.append(comparison.l2)
    return OutputMetrics(
        float(np.mean(cosines)), min(cosines), float(np.mean(distances)), max(distances), len(expected)
    )


# Distances -----------------------------------------------------------------------------------------------------------


Distance = Callable[[NumpyArray, NumpyArray], float]
_PEAK = 255.0


def _psnr(x: NumpyArray, y: NumpyArray) -> float:
    return -decibel(_PEAK**2, float(np.mean((x - y) ** 2)))


def ssim(x: NumpyArray, y: NumpyArray) -> float:
    """Structural similarity of two arrays as a whole, for values from 0 to 255; 1 where they are equal."""
    c1, c2 = (0.01 * _PEAK) ** 2, (0.03 * _PEAK) ** 2
    means, deviations = (x.mean(), y.mean()), (x.std(), y.std())
    above = (2 * means[0] * means[1] + c1) * (2 * deviations[0] * deviations[1] + c2)
    below = (means[0] ** 2 + means[1] ** 2 + c1) * (deviations[0] ** 2 + deviations[1] ** 2 + c2)
    return float(above / below)


SUMS: Mapping[str, Distance] = {
    "L2": lambda x, y: float(np.linalg.norm(x - y)),
    "L1": lambda x, y: float(abs(x - y).sum()),
    "cos": lambda x, y: 1 - cosine(x, y),
    "psnr": _psnr,
    "ssim": lambda x, y: 1 - ssim(x, y),
}
MEANS: Mapping[str, Distance] = {
    **SUMS,
    "L2": lambda x, y: float(np.mean((x - y) ** 2)),
    "L1": lambda x, y: float(abs(x - y).mean()),
    "cos": lambda x, y: (1 - cosine(x, y)) / 2,
}


def distance(name: str, kinds: Mapping[str, Distance]) -> Distance:
    """A distance by name. Raises ConfigError where there is none."""
    if name not in kinds:
        raise ConfigError(f"There is no search_metric {name!r}. {did_you_mean(name, kinds)}")
    return kinds[name]


def mean_distance(distance: Distance) -> Measure:
    """The mean over samples of a distance of all outputs as one vector."""

    def vector(arrays: Iterable[NumpyArray]) -> NumpyArray:
        return np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])

    def measure(samples: _Samplewise) -> float:
        return float(np.mean([distance(*map(vector, zip(*pairs, strict=True))) for pairs in samples]))

    return measure


OutputDistance = Callable[[Iterable[tuple[NumpyArray, NumpyArray]]], float]
"""(float output, quantized output) of each sample -> distance; less is better."""


def one_number(distance: OutputDistance) -> Measure:
    """A distance of the only output, NaN as infinite. Raises ConfigError where it gives no number."""

    def measure(samples: _Samplewise) -> float:
        found = distance(pair for (pair,) in samples)
        try:
            score = float(found)
        except (TypeError, ValueError):
            raise ConfigError(f"The metric of the outputs gave {found!r}, and must give one number.") from None
        return math.inf if math.isnan(score) else score

    return measure


def mean_by_metric(name: str) -> OutputDistance:
    """The mean over samples of a distance by the name of a metric; infinite where an output is not finite."""
    distance = kl if name == "kl" else partial(_metric_distance, Metric(name))

    def measure(outputs: Iterable[tuple[NumpyArray, NumpyArray]]) -> float:
        distances = [distance(x, y) if np.isfinite(y).all() else math.inf for x, y in outputs]
        return sum(distances) / len(distances)

    return measure


def _metric_distance(metric: Metric, x: NumpyArray, y: NumpyArray) -> float:
    return metric.distance(metric.of(Comparison().update(x, y)))


def distance_of(distance_fn: Any, evaluate_fn: Any, default: str) -> OutputDistance:
    """The distance that a config asks for.

    Args:
        distance_fn: (float outputs, quantized outputs) -> distance; each a list of samples, a sample a list of arrays.
        evaluate_fn: Instead: outputs -> how good they are.
        default: Instead: a name.
    """
    if distance_fn is None and evaluate_fn is None:
        return mean_by_metric(default)

    def measure(outputs: Iterable[tuple[NumpyArray, NumpyArray]]) -> float:
        before, after = zip(*(([np.asarray(x)], [np.asarray(y)]) for x, y in outputs), strict=True)
        if distance_fn is not None:
            return distance_fn(list(before), list(after))
        return evaluate_fn(list(before)) - evaluate_fn(list(after))

    return measure
