"""The trials of an automatic search: quantize with a config, write, score; the choice of the best.

All share one calibration and the float outputs.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from quark.base.log import logger
from quark.compat.auto_search.search_space import Config as Choice
from quark.errors import CalibrationError, ConfigError, QuarkError, one_line
from quark.onnx.calibration.calibrate import model_session
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.padding import without_padding
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.float_outputs import FloatOutputs
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.calibration.statistics import Statistics
from quark.onnx.config.config import Config, QuantizationConfig
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.settings import Settings
from quark.onnx.flow.flow import finish
from quark.onnx.flow.prepare import prepare
from quark.onnx.graph.model_file import load
from quark.onnx.search.evaluator import Distance, Evaluator, Score, Scorer, mean_distance
from quark.onnx.search.history import History
from quark.onnx.search.settle import check_algorithms, convert
from quark.onnx_ops.saving import save

FileEvaluator = Callable[[Any], float]
MOST_STATISTICS = 4
"""Forms of the model, by passes and algorithms before calibration, whose statistics are kept: half a MB a tensor."""


class SearchTrials:
    """Quantizes and scores one model under many configs; each gives what ModelQuantizer gives for it.

    Args:
        model: The float model: a path, or a ModelProto.
        calibration: Calibration data: a reader, or an iterable of samples.
        evaluation: Data to score with; None for the calibration data.
        distance: Between the outputs of a sample; the mean over samples is the score.
        evaluator: Instead: path of a model -> its quality. The score is that of the float model minus it.
        scratch: Folder for outputs of the float model that are too large for memory.

    Raises:
        CalibrationError: There is no sample.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | onnx.ModelProto,
        calibration: Any,
        evaluation: Any = None,
        distance: Distance | None = None,
        evaluator: FileEvaluator | None = None,
        scratch: str | None = None,
    ) -> None:
        if (distance is None) == (evaluator is None):
            raise ConfigError("A search scores by a metric or by an evaluator, one of them.")
        inputs, self._model = model_inputs(model), load(model)
        self._data = None if calibration is None else Samples(without_padding(calibration, self._model), inputs)
        scored = self._data if evaluation is None else Samples(without_padding(evaluation, self._model), inputs)
        self._statistics: dict[Any, dict[str, Statistics]] = {}
        if evaluator is not None:
            self._scorer: Callable[[Path], Scorer] = partial(_FileScorer, evaluator, float(evaluator(model)))
            return
        if scored is None or not len(scored):
            raise CalibrationError(
                "A search needs samples to score by: calibration or evaluation data, or an evaluator."
            )
        assert distance is not None
        plain = lower(Config(QuantizationConfig()))
        names = [value.name or "" for value in self._model.graph.outputs]
        expected = FloatOutputs(
            self._model, names, scored, lambda graph: model_session(graph, [], plain), folder=scratch
        )
        scorer = Scorer(expected, mean_distance(distance))
        self._scorer = lambda _: scorer

    @property
    def data_digest(self) -> str:
        """A hash of the number of calibration samples, and of the first."""
        if self._data is None or not len(self._data):
            return ""
        digest = hashlib.sha256(str(len(self._data)).encode())
        for name, array in sorted(self._data[0].items()):
            digest.update(repr((name, array.dtype.str, array.shape)).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def run(self, config: Any, path: Path) -> float:
        """Quantize with a config, write the model, and return its score, of which less is better.

        Raises:
            QuarkError: The config cannot be met; nothing is written then.
        """
        settings = lower(config)
        if settings.calibration.statistics is not None:
            raise ConfigError("A search keeps its statistics in memory: leave out the option Statistics.")
        check_algorithms(settings.algorithms)
        graph = self._model.clone()
        limit = settings.calibration.samples
        settings = prepare(graph, settings)
        data = self._data
        if data is not None and limit is not None:
            data = data.part(range(min(limit, len(data))))
        statistics = self._statistics.setdefault(limit if data is not None else None, {})

        def written(prepared: Prepared, settings: Settings) -> ir.Model:
            quantized = convert(prepared, settings)
            for identity in list(statistics)[:-MOST_STATISTICS]:
                del statistics[identity]
            finish(quantized, settings)
            save(quantized, path, settings.external_data)
            return quantized

        evaluator = Evaluator(Prepared(graph, data, statistics=statistics), self._scorer(path), written)
        return evaluator.evaluate(settings, told=True).score


class _FileScorer(Scorer):
    """Scores what was written by how much worse the user's function finds it than the float model."""

    def __init__(self, evaluator: FileEvaluator, baseline: float, path: Path) -> None:
        self._evaluator, self._baseline, self._path = evaluator, baseline, path

    def score(self, model: ir.Model, samples: range | None = None) -> Score:
        """The score of the file."""
        return Score(self._baseline - float(self._evaluator(str(self._path))), None)


class Study:
    """The trials of one search with their history; where a config fails, the search goes on.

    Args:
        trials: What quantizes and scores.
        history: Of this study.
        request_of: Choice -> the config that quantizes.
        path_of: Number of a trial -> where its model goes.
        words: How the log tells what became of a trial: of one that failed, (number, why); of each, (number, score,
            choice).
        sign: -1 where the largest score is the best.
        once: Whether what was tried is not tried again.

    Attributes:
        history, path_of: As given.
        error: What the last config that failed said.
    """

    def __init__(
        self,
        trials: SearchTrials,
        history: History,
        request_of: Callable[[Choice], Any],
        path_of: Callable[[int], Path],
        words: tuple[str, str],
        sign: float = 1.0,
        once: bool = False,
    ) -> None:
        self._trials, self.history, self._request_of, self.path_of = trials, history, request_of, path_of
        self._words, self._sign, self._once = words, sign, once
        self.error: QuarkError | None = None

    def score(self, choice: Choice) -> float:
        """The score of a choice, of which less is better; inf where it cannot be met."""
        known = self.history.score_of(choice) if self._once else None
        if known is not None:
            return known
        request, number = self._request_of(choice), len(self.history.trials)
        try:
            score = self._sign * self._trials.run(request, self.path_of(number))
        except QuarkError as error:
            self.error, score = error, math.inf
            logger.warning(self._words[0], number, one_line(error))
        logger.info(self._words[1], number, self._sign * score, choice)
        self.history.add(deepcopy(choice), score)
        return score

    def best_of(self, choices: Sequence[Choice]) -> Choice:
        """Try all; the best of them. Raises QuarkError where none succeeds: what the last one said."""
        return self.chosen(choices, [self.score(choice) for choice in choices])

    def sampled(self, sampler: Any, count: int) -> Choice:
        """Try what a sampler gives, a number of times; the best of these and of those before."""
        before = [trial for trial in self.history.trials if set(trial.choice) <= set(sampler.space)]
        choices = [dict(trial.choice) for trial in before]
        scores = [math.inf if trial.after is None else trial.after for trial in before]
        for _ in range(count):
            choices.append(sampler.suggest(list(zip(choices, scores, strict=True))))
            scores.append(self.score(choices[-1]))
        return self.chosen(choices, scores)

    def chosen(self, choices: Sequence[Choice], scores: Sequence[float]) -> Choice:
        """The choice with the least score. Raises QuarkError where there is none."""
        finite = [position for position, score in enumerate(scores) if math.isfinite(score)]
        if not finite:
            raise self.error or ConfigError("No trial succeeded.")
        return deepcopy(choices[min(finite, key=scores.__getitem__)])
