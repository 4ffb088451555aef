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

import onnx_ir as ir

from quark.base.log import logger
from quark.errors import QuarkError
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.statistics import Statistics
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
        scorer: Of all of them, these at last.
        seconds: Gives those that are left.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        held_out: Samples,
        scorer: PartScorer,
        seconds: Callable[[], float],
    ) -> None:
        fit: Samples = evaluator.prepared.data
        held_out.clock = fit.clock
        self.scorer, self._first, self._seconds = scorer, len(fit), seconds
        self._known = evaluator.prepared.statistics or {}
        of_weights = {identity: known.of_no_sample() for identity, known in self._known.items()}
        self._evaluator = replace(evaluator, prepared=replace(evaluator.prepared, data=held_out, statistics=of_weights))
        self._all = fit.followed_by(held_out)
        self._all.until = math.inf  # the last step may have had no time left; this takes a few seconds in any case

    def scored(self, *made: ScoredModel) -> list[ScoredModel] | None:
        """The models with the scores on all samples; None where there is no time for that.

        Args:
            made: Models that were calibrated with the first samples, and scored on the others; equal ones are measured
                once.
        """
        try:
            found: dict[int, ScoredModel] = {}
            for each in made:
                if id(each) not in found:
                    found[id(each)] = self._scored(each)
        except QuarkError as error:
            logger.info("No sample is measured by turns: %s", error)
            return None
        return [found[id(each)] for each in made]

    def with_all(self, made: ScoredModel) -> tuple[ir.Model, int]:
        """The model by the same settings that was calibrated with all samples, where it is no worse on these.

        Args:
            made: A model that `scored` gave.

        Returns:
            The model, and how many samples it was calibrated with.
        """
        if _needs_none(made.settings):
            return made.model, self._first
        on_others = replace(made, sums=made.sums[self._first :], decided=made.decided[self._first :])
        try:
            prepared = self._evaluator.prepared
            others = prepared.statistics or {}
            # What was seen of both parts is not looked at again.
            seen = {name: Statistics.joined(one, others[name]) for name, one in self._known.items() if name in others}
            prepared = replace(prepared, data=self._all, statistics=seen)
            model = replace(self._evaluator, prepared=prepared).made(made.settings)
            found, before = self.scorer.score(model), self.scorer.completed(on_others)
        except QuarkError as error:
            logger.info("The file is not calibrated with all samples: %s", error)
            return made.model, self._first
        if self.scorer.metric.better(before.score, found.value):
            return made.model, self._first
        return model, len(self._all)

    def _scored(self, made: ScoredModel) -> ScoredModel:
        if _needs_none(made.settings):
            return self.scorer.completed(made)
        # Ranges that a step has fixed stay: they are those of a few tensors.
        data: Samples = self._evaluator.prepared.data
        data.until = data.clock() + max(self._seconds(), made.seconds) if math.isfinite(self._seconds()) else math.inf
        return self.scorer.completed(made, self._evaluator.made(made.settings))


def _needs_none(settings: Settings) -> bool:
    """Return True where nothing of a model by these settings follows from samples."""
    return settings.specs.weights_apart and not settings.algorithms
