"""The task that data and a metric make of two model folders, beside figures of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quark.errors import ConfigError
from quark.jobs.folders.compared.classified_images import images_of
from quark.jobs.folders.compared.harness import Harness
from quark.jobs.folders.compared.measure import MeasuredFolders
from quark.jobs.folders.compared.questions import questions_of
from quark.jobs.folders.compared.task_scores import ACCURACY, CHOICE, LOSS, MAP, Pair, Task, TaskScores, own_metric
from quark.jobs.folders.model_inputs import ModelInputs, StepInputs
from quark.torch.llm.documents import holds_documents
from quark.torch.model.batches import evaluating


def task_of(
    metric: str | None, inputs: ModelInputs | StepInputs, data: Path, limit: int, streamed: bool
) -> Task | None:
    """The task of data and a metric; None where figures of the outputs are all.

    Args:
        metric: See `check_metric`; None: what the data hold.
        inputs: What the models take.
        data: Their place.
        limit: Most samples.
        streamed: Whether the models are read block by block.

    Raises:
        ConfigError: The metric is not one of such a model or such data, or needs models in memory.
        CalibrationError: The data cannot be read.
    """
    if metric == MAP:
        raise ConfigError(f"--metric {MAP} is of ONNX files. Possible: MODULE:FUNCTION, which gets the model.")
    if streamed and metric not in (None, LOSS, CHOICE, ACCURACY):
        raise ConfigError(f"--metric {metric} needs both models in memory. Possible: --no-stream, or another metric.")
    if metric is not None and ":" in metric:
        return partial(_own, own_metric(metric), metric)
    if metric == ACCURACY:
        return images_of(inputs, data, limit)
    if isinstance(inputs, ModelInputs) and inputs.continues_text:
        if holds_documents(data):
            return questions_of(metric, inputs, data, limit)
        if metric == LOSS:
            return None
    if metric is not None:
        raise ConfigError(
            f"--metric {metric} is for causal language models, and for JSON lines or a dataset with prompts and "
            f"answers; {inputs.model_class.__name__} and {data} are not both so."
        )
    return None


def with_tasks(measured: MeasuredFolders, models: Pair, task: Task | None, harness: Harness | None) -> MeasuredFolders:
    """The measurement, with the scores of both models on tasks. Raises as these do."""
    return replace(
        measured,
        task=None if task is None else task(models, measured.batches),
        harness=None if harness is None else harness.scores(models),
    )


def _own(score: Callable[[Any, Any], float], name: str, models: Pair, batches: Sequence[Any]) -> TaskScores:
    """The scores by a function of the user."""
    samples, scores = list(batches), list[float]()
    for each in models:
        with evaluating(each.model), torch.no_grad():
            scores.append(score(each.model, samples))
    return TaskScores(f"{len(samples)} sample{'s' if len(samples) != 1 else ''}", {name: (scores[0], scores[1])})
