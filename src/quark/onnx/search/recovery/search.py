"""The search of a recovery: steps are tried on top of the best model so far, until a target or the time is reached.

What a step gives is measured on samples that are set aside: each step is kept only where these gain by it more than
they differ in it (`gain.py`). Whatever is tried is quantized from the float model by settings alone, on statistics of
one pass over the data; the same settings give the same model again.

From `ENOUGH` samples on, others are set aside that no step is chosen by. They say at the end which of the models that
were made is written, and what it keeps: the plain config comes back where it is the better one on them. A quick search
of few samples spares none of them for that: half of them are calibrated with, by the others steps are chosen, and at
the end both change places (`turns.py`), so that each sample counts, and none for a file that was calibrated with it.

Where a model of integers lost so much that its task suffers, weights alone are tried (`WeightsAlone`): at last, or
first, if the plain config is further from what tasks take than steps bring a model.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import onnx
import onnx_ir as ir

from quark.base.log import logger
from quark.base.memory_and_disk import give_back_memory
from quark.base.progress import seconds_text, write_event
from quark.core.metrics import Metric
from quark.errors import (
    CalibrationError,
    ConfigError,
    NothingQualifiesError,
    NothingToQuantizeError,
    QuarkError,
    one_line,
)
from quark.onnx.calibration.calibrate import repeatable
from quark.onnx.calibration.data.own_time import own_time
from quark.onnx.calibration.data.readers import TimeUpError
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.front_ends import leave_ends
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.calibration.statistics import Statistics, fingerprint
from quark.onnx.config.settings import Settings
from quark.onnx.flow.prepare import prepare, same_passes
from quark.onnx.graph.model_file import is_constant
from quark.onnx.search.change import Goal, Situation
from quark.onnx.search.equalize_if_better import equalize_if_better
from quark.onnx.search.evaluator import Evaluator, PartScorer, ScoredModel
from quark.onnx.search.history import TimeBudget, Trial
from quark.onnx.search.latency.choose_nodes import PlacementChoice
from quark.onnx.search.latency.measure import measured_placement
from quark.onnx.search.latency.whole_file import time_ratio
from quark.onnx.search.noise.choices import Measured
from quark.onnx.search.recovery.alternative import Alternative, file_of, float_file
from quark.onnx.search.recovery.gain import is_sure
from quark.onnx.search.recovery.preference import ACCURACY, BETWEEN
from quark.onnx.search.recovery.steps import STEPS, WEIGHTS_STEPS, Step
from quark.onnx.search.recovery.turns import CONVERSIONS, FEW, Turns
from quark.onnx.search.settle import check_algorithms, convert, start_as_chosen

EVERY = 4
"""One sample in this many is set aside to choose steps by; as many samples are needed."""
ENOUGH, LAST = 32, 8
"""Samples from which on one in so many is set aside for the last look. Of fewer, ranges need all that are left."""

MARGIN = 0.8
"""Share of the time left that is planned with: layers differ in what they cost."""

RESERVE = 1.5
"""Seconds for the last resort, in times of those of the best model."""

_NO_HOPE = "left out: "
"""How the result of a step begins that was not tried for what another one gave."""

REACH = 15.0
"""dB that steps bring a model at most: 25 searches on 16 models that wheels ship gained up to 14.5."""

_UNSURE = "no more gain than the samples differ by"
_BACK = "the config as it is, on samples that no step was chosen by"
_ALTERNATIVE = "as without samples"
"""Name of a model that is made so, in the table of trials."""


@dataclass
class Recovery:
    """The result of a recovery.

    Attributes:
        model: The best model; None where it was written to a file.
        settings: With which `quark.onnx.search.settle.convert` makes it of the float model after its passes.
        metric: What was measured, on the held-out samples.
        target: The value that ends the search; None for none.
        plain, score: The metric of the plain config, and of the best model, on the samples of the last look. NaN for a
            plain config that gave way to a model without samples at once: it is not measured again.
        trials: The plain config, then the steps, in order, by the samples that steps are chosen by.
        fitted, held_out: How many samples were calibrated with, and measured on to choose steps.
        last_looked: On how many samples, by which no step was chosen, `plain` and `score` were measured; 0: there were
            too few samples, and both are of those that steps were chosen by.
        by_turns: On how many samples both were measured, each by a file that was not calibrated with it; 0: they were
            not.
        least: The metric that as many new samples show at least, as far as these tell.
        by_scores: Whether a part of an output that is a distribution, or of probabilities, was compared by its scores.
        lost: Whether the task suffers with the best model.
        types: What the model holds: (element type, "activations" or "weights") -> how many.
    """

    model: onnx.ModelProto | None
    settings: Settings
    metric: Metric
    target: float | None
    plain: float
    score: float
    trials: list[Trial]
    fitted: int
    held_out: int
    last_looked: int = 0
    by_turns: int = 0
    least: float = math.nan
    by_scores: bool = False
    lost: bool = False
    types: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def reached(self) -> bool:
        """True where there was a target, and it was reached: on new data too, as far as the samples tell."""
        return reaches(self.score if math.isnan(self.least) else self.least, self.target, self.metric)


def reaches(score: float, target: float | None, metric: Metric) -> bool:
    """True where there is a target, and a score is as good."""
    return target is not None and not metric.better(target, score)


def measure_text(metric: Metric, by_scores: bool) -> str:
    """The measure of a recovery, in words."""
    return f"{metric.name}{' of scores before the softmax or sigmoid' if by_scores else ''}"


def recover(
    model: ir.Model,
    settings: Settings,
    reader: Any,
    metric: Metric,
    target: float | None = None,
    budget: float | None = None,
    steps: Iterable[Step] = STEPS,
    quick: bool = False,
    allow_wider: bool = False,
    alternative: Alternative | None = None,
    weights: WeightsAlone | None = None,
    prefer: str = BETWEEN,
) -> tuple[Recovery, ir.Model]:
    """Find the best model; see `ModelQuantizer.recover`.

    Args:
        model: The float model; changed by the passes.
        settings: The plain ones.
        reader: Calibration data.
        metric: What counts.
        target: The value at which the search ends.
        budget: Seconds after which it ends; None for none. The plain config is quantized in any case.
        steps: What to try.
        quick: Where there are too few samples to set some aside, compare by all of them; without a target, compare
            distributions by their scores. End where what is lost is seldom felt.
        allow_wider: Whether steps may give more bits than the config asks for.
        alternative: What is made without samples, which the result has to be better than.
        weights: What else is tried where the task suffers.
        prefer: One of PREFERENCES. With ACCURACY tasks are taken to suffer earlier, and nodes in float are taken
            whatever their time.
    """
    found = _searched(
        model, settings, reader, metric, target, budget, steps, quick, allow_wider, alternative, weights, prefer
    )
    return found.written()


@dataclass(frozen=True)
class _Found:
    """The result of a search, and what is written of it; of two searches, one alone is.

    Attributes:
        recovery: The result, without the model.
        best: The best model.
        turns: What calibrates it with all samples, where these were measured by turns.
    """

    recovery: Recovery
    best: ScoredModel
    turns: Turns | None

    def written(self) -> tuple[Recovery, ir.Model]:
        """The result with the model, which all samples calibrate where they were measured by turns."""
        quantized, fitted = self.best.model, self.recovery.fitted
        if self.turns is not None:
            quantized, fitted = self.turns.with_all(self.best)
        return replace(self.recovery, fitted=fitted, types=element_types(quantized)), quantized


def _searched(
    model: ir.Model,
    settings: Settings,
    reader: Any,
    metric: Metric,
    target: float | None,
    budget: float | None,
    steps: Iterable[Step],
    quick: bool,
    allow_wider: bool = False,
    alternative: Alternative | None = None,
    weights: WeightsAlone | None = None,
    prefer: str = BETWEEN,
    passed: Settings | None = None,
) -> _Found:
    clock = own_time if quick else time.monotonic  # a result that nobody set a time for does not depend on the load
    time_left = TimeBudget.of(budget, clock)
    _check(settings, metric, target)
    asked, settings = settings, prepare(model, settings, passed)
    _share_passes(model, asked, settings, (alternative, weights))
    data = repeatable(reader, model, settings)
    fit, held_out, last = split(data, quick)
    prepared = Prepared(model, fit)
    settings, kernels = _settled(prepared, settings)
    both = _by_turns(fit, held_out, last, quick)
    of_all = PartScorer(
        model, both or held_out, metric, settings, by_scores=quick and target is None, strict=prefer == ACCURACY
    )
    scorer = of_all.on_last(len(held_out))
    fit.clock = clock
    evaluator = Evaluator(replace(prepared, identity=fingerprint(model), statistics={}), scorer, convert)
    search = _Search(evaluator, fit, scorer, target, time_left, None if prefer == ACCURACY else kernels)
    search.start(settings)

    def apart() -> _Found | None:
        return None if weights is None else weights.recovered(data, metric, target, budget)

    # Where static integers win no time, no search makes them worth it.
    if alternative is None or not search.gives_way(alternative):
        if search.needs_steps(apart):
            search.run(steps, allow_wider, quick)
    else:
        alternative = None  # it is the best
    turns = search.end(last, (held_out, of_all) if both else None, alternative)
    best = search.best
    found = Recovery(
        None, best.settings, metric, target, search.plain.score, best.score, search.trials, len(fit), len(held_out),
        search.last_looked, search.by_turns, search.scorer.least(best, new=True), bool(search.scorer.scored),
        search.lost,
    )  # fmt: skip
    other = apart() if found.lost else None
    return _Found(found, best, turns) if other is None else _better(_Found(found, best, turns), other)


def _share_passes(
    model: ir.Model, asked: Settings, prepared: Settings, others: Iterable[Alternative | WeightsAlone | None]
) -> None:
    """Offer the model after its passes to what may be made instead."""
    for other in others:
        if other is not None:
            other.begin_with(model, asked, prepared)


def _by_turns(fit: Samples, held_out: Samples, last: Samples | None, quick: bool) -> Samples | None:
    """All samples, where both parts change places at the end; None where they do not."""
    return fit.followed_by(held_out) if quick and last is None and held_out is not fit else None


def _check(settings: Settings, metric: Metric, target: float | None) -> None:
    """Raise ConfigError or NotSupportedError for what no recovery can do."""
    if target is not None and not (isinstance(target, Real) and not math.isnan(target)):
        raise ConfigError(f"The target {target!r} is no number; possible: a value of {metric.name}, or None.")
    if settings.calibration.statistics is not None:
        raise ConfigError("Recovery keeps its statistics in memory: leave out Statistics (--statistics).")
    check_algorithms(settings.algorithms)


def _settled(prepared: Prepared, settings: Settings) -> tuple[Settings, PlacementChoice | None]:
    """Settings in which kernels and equalized layers are chosen once, and the kernels; None where none were timed."""
    _, settings = leave_ends(prepared, settings)
    kernels = None
    if settings.measurement.enabled:
        settings, kernels = measured_placement(prepared, settings)
        give_back_memory()
    if settings.equalize_if_better:
        settings, _ = equalize_if_better(prepared, settings, start_as_chosen)
    return settings, kernels


def split(data: Samples | None, quick: bool = False) -> tuple[Samples, Samples, Samples | None]:
    """The samples to calibrate with, every fourth, which steps are chosen by, and some that nothing is chosen by.

    Args:
        data: All samples.
        quick: Whether steps are chosen by every other one, until these are `FEW`, and all are measured at last. Too few
            to set some aside are all calibrated with, and chosen by.

    Returns:
        None for the last where there are too few. Raises CalibrationError for fewer still.
    """
    count = 0 if data is None else len(data)
    if quick and data is not None and 0 < count < EVERY:
        return data, data, None
    if data is None or count < EVERY:
        raise CalibrationError(
            f"Recovery measures on every {EVERY}th calibration sample, which it sets aside: at least {EVERY} samples "
            f"are needed, and there {'is 1' if count == 1 else f'are {count}'}."
        )
    if quick and count < EVERY * FEW:
        chosen = [(2 * i + 1) * count // (2 * min(count // 2, FEW)) for i in range(min(count // 2, FEW))]
        return _all_but(data, chosen), data.part(chosen), None
    held_out, last = range(EVERY - 1, count, EVERY), range(1, count if count >= ENOUGH else 0, LAST)
    return _all_but(data, {*held_out, *last}), data.part(held_out), data.part(last) if last else None


def _all_but(data: Samples, positions: Collection[int]) -> Samples:
    return data.part([i for i in range(len(data)) if i not in positions])


_WHY_NOT: dict[type[Exception], str] = {
    TimeUpError: "stopped: the budget ended",
    NothingQualifiesError: "nothing in this model qualifies",
    NothingToQuantizeError: "no node would stay in integers",
}
"""The result of a step that ended in such an error; of others, the error says it."""


def _why_not(error: Exception) -> str:
    return _WHY_NOT.get(type(error), one_line(error).rstrip("."))


class _Search:
    """The best so far, and what leads to the next."""

    def __init__(
        self,
        evaluator: Evaluator,
        fit: Samples,
        scorer: PartScorer,
        target: float | None,
        budget: TimeBudget,
        kernels: PlacementChoice | None,
    ) -> None:
        self.evaluator, self.target, self.budget, self.kernels = evaluator, target, budget, kernels
        self.fit, self.scorer, self.trials = fit, scorer, list[Trial]()
        self._has_steps, self.last_looked, self.by_turns = False, 0, 0
        assert evaluator.prepared.statistics is not None
        self._statistics: dict[str, Statistics] = evaluator.prepared.statistics
        self._extra: dict[str, float] = {}
        self._noises: Measured = []
        self._timed: tuple[ir.Model, onnx.ModelProto, float] | None = None

    @property
    def done(self) -> bool:
        """True where the best model reaches the target."""
        return self.target is not None and reaches(
            self.scorer.least(self.best, new=True), self.target, self.scorer.metric
        )

    @property
    def measure(self) -> str:
        """The measure of this search, in words."""
        return measure_text(self.scorer.metric, bool(self.scorer.scored))

    @property
    def lost(self) -> bool:
        """True where tasks suffer with the best model so far."""
        return self.scorer.is_lost(self.best)

    @property
    def _is_plenty(self) -> bool:
        """True where there is no target, and the loss of the best model is seldom felt."""
        best = self.best
        return self.target is None and self.scorer.is_plenty(best)

    def needs_steps(self, other: Callable[[], _Found | None]) -> bool:
        """True where steps may make the best as good as another model, which is made where the best is far from a task.

        It is far where steps bring no model to what tasks take; where there is a target, all is tried.
        """
        if self.target is not None or not self.scorer.is_far(self.best, REACH):
            return True
        start = self.fit.clock()
        if (made := other()) is None:
            return True
        self.budget = replace(self.budget, end=self.budget.end + self.fit.clock() - start)
        found = made.recovery
        # With no more than noise (-inf dB) there is no telling what steps bring.
        ahead = found.score - self.best.score if math.isfinite(self.best.score) else 0.0
        if found.lost and ahead <= REACH:
            return True
        logger.info("Recovery: the other steps are left out: they do not make up for what static integers lost.")
        return False

    def left(self, step: Step) -> float:
        """Seconds for a step. Where there is a target, no other step takes the time of the last resort."""
        kept = 0.0 if step.last_resort or self.target is None else RESERVE * self.best.seconds
        return self.budget.left(kept)

    def quantize_plain(self, settings: Settings) -> ScoredModel:
        """Quantize by the plain settings. A step that finds nothing raises, unless the config holds such a one."""
        try:
            return self.evaluator.evaluate(replace(settings, allow_noop=False))
        except NothingQualifiesError:
            if not settings.allow_noop:
                raise
            return self.evaluator.evaluate(settings)

    def start(self, settings: Settings) -> None:
        """Begin with the plain config, and with the clock: it is quantized whatever it takes."""
        plain = self.quantize_plain(settings)
        self.best, self.plain, self._cheapest = plain, plain, plain.seconds
        self.trials.append(Trial("the config as it is", None, plain.score, plain.seconds, "kept"))
        logger.info("Recovery: %s as it is: %s.", self.measure, self.scorer.metric.text(plain.score))

    def run(self, steps: Iterable[Step], allow_wider: bool, quick: bool) -> None:
        """Try steps until the target is reached; quick ones without a target, until the loss is seldom felt."""
        for step in steps:
            if self.done or (quick and self._is_plenty):
                break
            give_back_memory()
            if step.wider and self.target is not None and not allow_wider:
                self.leave_out(step)
            else:
                self.attempt(step)

    def gives_way(self, alternative: Alternative, at_last: bool = False) -> bool:
        """Take what was made without samples as the best, if it is better than what was made with them.

        Args:
            alternative: What makes it.
            at_last: Whether no step follows.
        """
        # The last step may have had no time left; this has a few seconds in any case.
        start, before, self.fit.until = self.fit.clock(), self.best, math.inf
        other = alternative.instead_of(before, self.scorer, self.fit, at_last)
        if other is not None:
            self.best = other
            self._tell(Trial(_ALTERNATIVE, before.score, other.score, self.fit.clock() - start, "kept"))
        return other is not None

    def end(
        self, last: Samples | None, others: tuple[Samples, PartScorer] | None, alternative: Alternative | None
    ) -> Turns | None:
        """Measure what was made, and take the best.

        Args:
            last: Samples that are set aside for that; None where there are too few.
            others: Those that steps were chosen by, which may calibrate in turn, and the scorer of all samples; None
                where they may not.
            alternative: What was made without samples.

        Returns:
            What calibrates the best with all samples, where these were measured by turns.
        """
        turns, in_time = None, self.budget.left() >= CONVERSIONS * self.best.seconds
        if others is not None and in_time:
            turns = Turns(self.evaluator, *others, self.budget.left)
        scorer = None
        if last is not None:
            scorer = self.scorer.on(self.evaluator.prepared.model, last, self.plain.settings)
        self.look_at_last(scorer, alternative, turns)
        return turns if self.by_turns else None

    def look_at_last(
        self, scorer: PartScorer | None, alternative: Alternative | None = None, turns: Turns | None = None
    ) -> None:
        """Compare what was made on samples that no step was chosen by, and take what is worse by nothing.

        No step makes a model smaller or faster: where the plain config is the more exact one, it is better.

        Args:
            scorer: Of these samples; None where there are none.
            alternative: What was made without samples, too.
            turns: What measures on all samples, where none are set aside; None: those of the steps have to do.
        """
        # A plain config that no step was built on, and that another model is better than, would be made in vain.
        gave_way = self.best is not self.plain and not self._has_steps
        made = [self.best] if gave_way else [self.plain, self.best]
        if turns is not None and (looked := turns.scored(*made)) is not None:
            self.scorer, self.best = turns.scorer, looked[-1]
            self.plain = replace(self.plain, score=math.nan) if gave_way else looked[0]
            self.by_turns = len(self.scorer)
        if scorer is not None:
            is_plain, self.scorer, self.last_looked = self.best is self.plain, scorer, len(scorer)
            self.plain = self.plain.scored_by(scorer)
            self.best = self.plain if is_plain else self.best.scored_by(scorer)
        if self._has_steps and self.scorer.metric.better(self.plain.score, self.best.score):
            self._tell(Trial(_BACK, self.best.score, self.plain.score, 0.0, "kept"))
            self.best = self.plain
        if alternative is not None:
            self.gives_way(alternative, at_last=True)

    def leave_out(self, step: Step) -> None:
        """Note a step that would give another scheme than was asked for."""
        why = "left out: more bits than the config asks for, which allow_wider=True (--allow-wider) lets it have"
        self.trials.append(Trial(step.name, self.best.score, None, 0.0, why))

    def attempt(self, step: Step) -> None:
        """Try a step on top of the best, and note what it gave; nothing where it would change nothing."""
        start, before, after = self.fit.clock(), self.best, None
        situation, self.fit.until = self._situation(step), start + self.left(step)
        try:
            changed = step.change(before.settings, situation)
        except (TimeUpError, QuarkError) as error:  # time ends within a change that looks at samples itself
            changed = _why_not(error)
        if changed is None:
            return
        result = changed if isinstance(changed, str) else self._unfit(step)
        if not isinstance(changed, str) and not result:
            after, result = self._compared(step, changed, situation.share)
        self._tell(Trial(step.name, before.score, after, self.fit.clock() - start, result))

    def _tell(self, trial: Trial) -> None:
        """Note a trial, and say what it gave. How long the search takes is known only where it has a budget."""
        self.trials.append(trial)
        metric, left = self.scorer.metric, self.budget.shown
        scores = "" if trial.before is None or trial.after is None else f"{metric.text(trial.after)}, "
        rest = "" if left is None else f", {seconds_text(left)} of the budget left"
        logger.info("Recovery: %s: %s%s, %s%s.", trial.step, scores, trial.result, seconds_text(trial.seconds), rest)
        write_event(
            "block", loop="recovery", block=trial.step, layers=[], error_before=trial.before, error_after=trial.after,
            measure=self.measure, result=trial.result, seconds=trial.seconds, eta_s=left,
        )  # fmt: skip

    def _compared(self, step: Step, settings: Settings, share: float) -> tuple[float | None, str]:
        """Quantize; keep what is better. Returns the metric, and what became of it."""
        present = set(self._statistics)
        try:
            found = self.evaluator.evaluate(settings)
        except (TimeUpError, QuarkError) as error:
            result, found = _why_not(error), None
        better = found is not None and self.scorer.metric.better(found.score, self.best.score)
        sure = better and found is not None and is_sure(self.scorer.metric, self.best.sums, found.sums)
        dear = self._dear(step, found) if sure and found is not None else ""
        sure = sure and not dear
        self._forget(present, sure)
        if found is None:
            return None, result
        self._cheapest = min(self._cheapest, found.seconds)
        self._extra[step.name] = (found.seconds - self._cheapest) / share
        if sure:
            self.best, self._has_steps = found, True
        return found.score, "kept" if sure else dear or (_UNSURE if better else "no gain")

    def _dear(self, step: Step, found: ScoredModel) -> str:
        """Why the gain of a step is not worth the time that its file takes longer, or ""."""
        if not step.price:
            return ""
        best, (feed, threads) = self.best, (self.fit[0], found.settings.measurement.threads)
        try:
            if self._timed is None or self._timed[0] is not best.model:
                reference, file = float_file(self.evaluator.prepared.model), file_of(best)
                self._timed = best.model, file, time_ratio(reference, file, feed, threads)
            _, file, time = self._timed
            other = file_of(found)
            ratio = time_ratio(file, other, feed, threads)
        except QuarkError as error:
            return f"its time is not known: {one_line(error).rstrip('.')}"
        gain, longer = found.score - best.score, 100 * time * (ratio - 1)
        if gain >= step.price * longer:
            self._timed = found.model, other, time * ratio  # it becomes the best
            return ""
        return f"{gain:.2f} dB for {longer:.1f}% of the time of the float model, less than {step.price:g} dB for 1%"

    def _forget(self, present: set[str], better: bool) -> None:
        """Drop the statistics that the best model does not need: they are half a megabyte for each tensor."""
        new = set(self._statistics) - present
        if not new:
            return
        for identity in present if better else new:
            del self._statistics[identity]

    def _work(self, step: Step) -> float:
        """Seconds that a step adds to all layers, by what the one like it added to the cheapest model; 0 if unknown."""
        return step.factor * self._extra.get(step.like, 0.0)

    def _unfit(self, step: Step) -> str:
        """Why a step is left out, or ""."""
        hopeless = self._hopeless(step)
        if hopeless:
            return hopeless
        left = max(0.0, self.left(step))
        enough = self.best.seconds <= left
        return "" if enough else f"skipped: about {self.best.seconds + self._work(step):.0f} s, and {left:.0f} s left"

    def _hopeless(self, step: Step) -> str:
        """Why what another step gave says that this one gains nothing, or ""; all is tried for a target."""
        trial = next((trial for trial in self.trials if trial.step == step.follows), None)
        if self.target is not None or trial is None or trial.before is None:
            return ""
        if trial.after is None:
            return trial.result if trial.result.startswith(_NO_HOPE) else ""
        before, after = (self.scorer.metric.noise(value, 1) for value in (trial.before, trial.after))
        gain = 10 * math.log10(before / after) if before > 0 and after > 0 else math.copysign(math.inf, before)
        if gain >= step.least:
            return ""
        told = f"gained {gain:.2f} dB" if gain >= 0 else f"lost {-gain:.2f} dB"
        bound = f"gains {step.least:.1f} dB" if step.least >= 0 else f"loses at most {-step.least:.1f} dB"
        return f"{_NO_HOPE}{trial.step} {told}, and this is tried only where that {bound}"

    def _situation(self, step: Step) -> Situation:
        work, left = self._work(step), max(0.0, MARGIN * (self.left(step) - self.best.seconds))
        share = 1.0 if work <= left else left / work
        outputs, worst = [value.name for value in self.evaluator.prepared.model.graph.outputs], self.best.output
        output = 0 if worst is None else outputs.index(worst.tensor)
        goal = Goal(self.scorer.metric, self.target, len(self.scorer), output)
        forward, seconds = self.scorer.expected.forward_seconds, self.left(step) - self.best.seconds
        return Situation(
            self.plain.settings, share, goal, self.evaluator.prepared, self.lost, self._noises, self.scorer.values,
            forward, seconds, self.kernels,
        )  # fmt: skip


# Weights alone -------------------------------------------------------------------------------------------------------


STEP = "weights alone in integers"


class WeightsAlone:
    """A model of which the weights alone are integers.

    Args:
        model: The float model as it was loaded; changed.
        settings: Of weights alone.
    """

    def __init__(self, model: ir.Model, settings: Settings) -> None:
        self._model, self._settings = model, settings
        self._passed: Settings | None = None
        self._found: _Found | None = None

    def begin_with(self, model: ir.Model, asked: Settings, prepared: Settings) -> None:
        """Take the model that `prepare` made by other settings, where the passes are the same."""
        if same_passes(asked, self._settings):
            self._model, self._passed = model.clone(), prepared

    def recovered(self, data: Samples | None, metric: Metric, target: float | None, budget: float | None) -> _Found:
        """The result of a quick recovery in half of the budget, which the first call makes."""
        if self._found is None:
            seconds = None if budget is None else budget / 2
            self._found = _searched(
                self._model, self._settings, data, metric, target, seconds, WEIGHTS_STEPS, quick=True,
                passed=self._passed,
            )  # fmt: skip
        return self._found


def _better(first: _Found, other: _Found) -> _Found:
    """The better of two by the same measure on the same samples, told as one recovery with one more step."""
    found, apart = first.recovery, other.recovery
    kept = found.metric.better(apart.score, found.score)
    took = sum(trial.seconds for trial in apart.trials)
    trial = Trial(STEP, found.score, apart.score, took, "kept" if kept else "no gain")
    chosen = other if kept else first
    told = replace(chosen.recovery, plain=found.plain, trials=[*found.trials, trial])
    return replace(chosen, recovery=told)


# What a model holds --------------------------------------------------------------------------------------------------


def element_types(model: ir.Model) -> dict[tuple[str, str], int]:
    """(element type, "activations" or "weights") -> how many tensors of a quantized model have it.

    Codes of int32 are biases, which follow from the rest, and are not counted. A block format counts by the name of its
    operator.
    """
    found: Counter[tuple[str, str]] = Counter()
    for node in model.graph:
        quantizes = node.op_type.endswith("QuantizeLinear") and "Dynamic" not in node.op_type
        decodes = node.op_type.endswith("DequantizeLinear") and is_constant(node.inputs[0])
        zero = node.inputs[2] if len(node.inputs) > 2 else None
        if (quantizes or decodes) and zero is not None and zero.dtype is not None and zero.dtype.name != "INT32":
            found[zero.dtype.name.lower(), "weights" if decodes else "activations"] += 1
        elif node.op_type.endswith("QuantizeDequantize"):
            found[node.op_type, "weights" if is_constant(node.inputs[0]) else "activations"] += 1
    return dict(found)
