"""The accuracy of two classifiers on images with labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from quark.base.data_files.images import class_numbers, labels_of
from quark.errors import ConfigError
from quark.jobs.folders.compared.task_scores import Pair, Task, TaskScores, outputs_of_both
from quark.jobs.folders.model_inputs import ModelInputs, StepInputs


def images_of(inputs: ModelInputs | StepInputs, data: Path, limit: int) -> Task:
    """The task that a folder of images with labels makes.

    Args:
        inputs: What the models take.
        data: The folder, as `labels_of` reads it.
        limit: Most images.

    Raises:
        ConfigError: The models are no classifiers of images, or a label is none of their classes.
        CalibrationError: There are no labels.
    """
    classifies = isinstance(inputs, ModelInputs) and "ImageClassification" in inputs.model_class.__name__
    if not classifies or not data.is_dir():
        raise ConfigError(
            f"--metric accuracy is of classifiers of images and a folder of images; {inputs.model_class.__name__} and "
            f"{data} are not both so."
        )
    assert isinstance(inputs, ModelInputs)
    labels = labels_of(data, list(islice(inputs.files(data), limit)))
    config = inputs.config
    return partial(_scored, class_numbers(labels, config.num_labels, config.label2id or {}, str(data)))


def _scored(right: Sequence[int], models: Pair, batches: Sequence[Any]) -> TaskScores:
    """How many images both put into their class."""
    chosen: tuple[list[int], list[int]] = [], []
    for _, outputs in outputs_of_both(models, batches, "accuracy"):
        for found, output in zip(chosen, outputs, strict=True):
            found.append(int(output["logits"][0].argmax()))
    before, after = (sum(one == other for one, other in zip(each, right, strict=True)) / len(right) for each in chosen)
    same = sum(one == other for one, other in zip(*chosen, strict=True)) / len(right)
    return TaskScores(f"{len(right)} image{'s' if len(right) != 1 else ''}", {"accuracy": (before, after)}, same)
