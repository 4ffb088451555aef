"""turns: the score of settings on all samples, each measured with a file that was not calibrated with it.

    samples      a half           the other half
    calibrated   the file         a second one by the same settings
    measured     a second one     the file

Of four samples the noise says little: that of a few is often a hundred times that of the others. By turns twice to four
times as many tell what is kept (cross-validation, Stone 1974). A file that needs no samples is measured on all itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from quark.base.log import logger
from quark.errors import QuarkError
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.config.settings import Settings
from quark.onnx.search.evaluator import Evaluator, PartScorer, ScoredModel

FEW = 32
"""Samples that steps are chosen by, from which on these tell enough."""
CONVERSIONS = 3
"""Models that are made at most: the plain config and the best by turns, and the one of all samples."""


class Turns:
    """Measures what an evaluator makes.

    Args:
        evaluator: It, and the samples that it calibrates with.
        held_out: The others.
        scorer_of: Gives a scorer of samples.
        seconds: Gives those that are left.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        held_out: Samples,
        scorer_of: Callable[[Samples], PartScorer],
        seconds: Callable[[], float],
    ) -> None:
        fit: Samples = evaluator.prepared.data
        held_out.clock = fit.clock
        self._first, self._seconds = len(fit), seconds
        self._evaluator = replace(evaluator, prepared=replace(evaluator.prepared, data=held_out, statistics={}))
        self._all, self._scorer_of = fit.followed_by(held_out), scorer_of
        self._all.until = math.inf  # the last step may have had no time left; this takes a few seconds in any case

    def scored(self, *made: ScoredModel) -> tuple[PartScorer, list[ScoredModel]] | None:
        """The scorer of all samples, and the models with the scores on these; None where there is no time for that.

        Args:
            made: Models that were calibrated with the first samples; equal ones are measured once.
        """
        scorer = self._scorer_of(self._all)
        try:
            found: dict[int, ScoredModel] = {}
            for each in made:
                if id(each) not in found:
                    found[id(each)] = self._scored(each, scorer)
        except QuarkError as error:
            logger.info("No sample is measured by turns: %s", error)
            return None
        return scorer, [found[id(each)] for each in made]

    def with_all(self, made: ScoredModel, scorer: PartScorer) -> tuple[ScoredModel, int]:
        """The model by the same settings that was calibrated with all samples, where it is no worse on these.

        Args:
            made: A model that `scored` gave.
            scorer: That of all samples.

        Returns:
            The model, with the score that it had, and how many samples it was calibrated with.
        """
        if _needs_none(made.settings):
            return made, self._first
        try:
            prepared = replace(self._evaluator.prepared, data=self._all, statistics={})
            model = replace(self._evaluator, prepared=prepared).made(made.settings)
            found, before = scorer.score(model), scorer.score(made.model)
        except QuarkError as error:
            logger.info("The file is not calibrated with all samples: %s", error)
            return made, self._first
        if scorer.metric.better(before.value, found.value):
            return made, self._first
        return replace(made, model=model), len(self._all)

    def _scored(self, made: ScoredModel, scorer: PartScorer) -> ScoredModel:
        if _needs_none(made.settings):
            return made.scored_by(scorer)
        # Ranges that a step has fixed stay: they are those of a few tensors.
        data: Samples = self._evaluator.prepared.data
        data.until = data.clock() + max(self._seconds(), made.seconds) if math.isfinite(self._seconds()) else math.inf
        other = self._evaluator.made(made.settings)
        parts = scorer.score(other, range(self._first)), scorer.score(made.model, range(self._first, len(self._all)))
        sums, decided = ([*before, *after] for before, after in zip(*(part[2:] for part in parts), strict=True))
        return made.with_score(scorer.over(sums, decided))


def _needs_none(settings: Settings) -> bool:
    """Return True where nothing of a model by these settings follows from samples."""
    return settings.specs.weights_apart and not settings.algorithms
