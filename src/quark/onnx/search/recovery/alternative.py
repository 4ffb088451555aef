"""alternative: the model that is made without samples, which one made with them has to be better than.

Static integers lose what inputs quantized as they come, or weights alone, keep: they are worth it where they win time
that no two measurements differ by, and where the task does not suffer. How much time is worth what they lose is a
preference of the user (`preference.py`). Where the other has lost so much that tasks suffer, and nothing is left to
better it by, the more exact one wins. Where the held-out samples of a detector hold no event, they do not tell what
ranges do to one: the alternative wins unless it has lost them.

Both files run by turns on one sample; a ratio that is near the bound is that of more looks, each with sessions opened
anew.
"""

from __future__ import annotations

from statistics import median

import onnx
import onnx_ir as ir

from quark.base.log import logger, severity
from quark.errors import QuarkError
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.calibration.data.own_time import own_time
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.settings import Settings
from quark.onnx.flow.flow import finish
from quark.onnx.flow.prepare import prepare, same_passes
from quark.onnx.graph.model_file import to_proto
from quark.onnx.search.evaluator import PartScorer, ScoredModel
from quark.onnx.search.latency.measure import leave_slower_in_float
from quark.onnx.search.latency.whole_file import time_ratio
from quark.onnx.search.lost_outputs.verdict import LEAST
from quark.onnx.search.recovery.preference import BETWEEN, PREFERENCES, SIZE, SPEED, Costs, bound_of, choice_text
from quark.onnx.search.settle import convert
from quark.onnx_ops.saving import PROTOBUF_LIMIT, weight_bytes

CLEAR = 0.1
"""How far from that share the first look has to be, to be the last."""
LOOKS = 3


class Alternative:
    """A model that is made without samples.

    Args:
        model: The float model as it was loaded; changed.
        settings: Of dynamic quantization, or of weights alone.
        preference: One of PREFERENCES.
    """

    def __init__(self, model: ir.Model, settings: Settings, preference: str = BETWEEN) -> None:
        self._model, self._settings, self._preference = model, settings, preference
        self._passed: Settings | None = None
        self._scored: ScoredModel | None = None
        self._scorer: PartScorer | None = None
        self._proto: onnx.ModelProto | None = None
        self._compared: tuple[ir.Model, tuple[float, float]] | None = None
        self._given_up = False

    def begin_with(self, model: ir.Model, asked: Settings, prepared: Settings) -> None:
        """Take the model that `prepare` made by other settings, where the passes are the same."""
        if same_passes(asked, self._settings):
            self._model, self._passed = model.clone(), prepared

    def instead_of(
        self, other: ScoredModel, scorer: PartScorer, data: Samples, at_last: bool = False
    ) -> ScoredModel | None:
        """The alternative where it is the better one; None where it is not, or cannot be made or run.

        Args:
            other: What was made with samples.
            scorer: What both are scored by.
            data: Calibration samples, of which the first is run.
            at_last: Whether nothing will better the other one: if the task suffers with it, no time makes up for that.
        """
        if self._given_up:
            return None
        try:
            scored = self._scored_model(scorer, data)
            taken, why = self._is_taken(scored, other, scorer, data, at_last)
        except QuarkError as error:
            logger.info("Nothing that is made without samples is compared: %s", error)
            self._given_up = True
            return None
        if why:
            before, after = (scorer.metric.text(each.score) for each in (scored, other))
            logger.info("Made without samples: %s; with: %s, %s.", before, after, why)
        return scored if taken else None

    def _is_taken(
        self, scored: ScoredModel, other: ScoredModel, scorer: PartScorer, data: Samples, at_last: bool
    ) -> tuple[bool, str]:
        """Decide whether the alternative is taken; the reason is "" where nothing was to be compared."""
        without = "the file without samples is taken"
        more_exact = scorer.metric.better(scored.score, other.score)
        if at_last and scorer.silent and scorer.metric.better(scored.score, LEAST):
            return True, f"no sample holds an event, so that ranges may end below one: {without}"
        if at_last and more_exact and scorer.is_lost(other):
            return True, f"with which tasks suffer: {without}"
        # Steps better the other one: until they have, it gives way where time would not make up for what it lost.
        rule = self._preference if at_last or self._preference == SPEED else BETWEEN
        if not more_exact and at_last and scorer.is_lost(scored):
            return False, "the file with samples is taken, as tasks suffer without them"
        if not more_exact and not (at_last and rule in (SPEED, SIZE)):
            return False, ""
        costs = Costs(more_exact, *self._costs(scored, other, data[0]))
        said = f"{costs.time:.2f} of the time, {1 / costs.bytes:.2f} of the bytes: {choice_text(costs, rule, at_last)}"
        return PREFERENCES[rule](costs), said

    def _costs(self, scored: ScoredModel, other: ScoredModel, feed: Feed) -> tuple[float, float]:
        """Time of the other over that of the alternative; bytes of the alternative over those of the other."""
        if self._compared is not None and self._compared[0] is other.model:
            return self._compared[1]  # no step has bettered it since
        self._proto = self._proto or file_of(scored)
        proto = file_of(other)
        # One look, or the median of a few near the bound.
        bound, threads = bound_of(self._preference), scored.settings.measurement.threads
        looks = [time_ratio(self._proto, proto, feed, threads, bound)]
        if abs(looks[0] / bound - 1) < CLEAR:
            looks += [time_ratio(self._proto, proto, feed, threads, bound) for _ in range(LOOKS - 1)]
        found = median(looks), self._proto.ByteSize() / proto.ByteSize()
        self._compared = other.model, found
        return found

    def _scored_model(self, scorer: PartScorer, data: Samples) -> ScoredModel:
        if self._scored is None:
            start = own_time()
            with severity(2):
                model, settings = self._model, prepare(self._model, self._settings, self._passed)
                prepared = Prepared(model, data)
                if settings.measurement.enabled:
                    settings = leave_slower_in_float(prepared, settings)
                model = convert(prepared, settings)
            found = scorer.score(model)
            made = ScoredModel(settings, model, found.value, found.part, own_time() - start)
            self._scored = made.with_score(found)
            self._scorer = scorer
        if self._scorer is not None and self._scorer is not scorer:
            same = self._scorer.expected is scorer.expected
            self._scored = scorer.completed(self._scored) if same else self._scored.scored_by(scorer)
            self._scorer = scorer
        return self._scored


def file_of(scored: ScoredModel) -> onnx.ModelProto:
    """The message that would be written to a file. Raises QuarkError for one over 2 GB."""
    model = scored.model.clone()
    finish(model, scored.settings)
    return float_file(model)


def float_file(model: ir.Model) -> onnx.ModelProto:
    """The message of a model. Raises QuarkError for one over 2 GB."""
    if weight_bytes(model) >= PROTOBUF_LIMIT:
        raise QuarkError("a model over 2 GB is not run from memory.")
    return to_proto(model)
