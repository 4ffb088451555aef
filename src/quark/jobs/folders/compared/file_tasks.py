"""The task that data and a metric make of two ONNX files, beside figures of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from quark.base.data_files.images import class_numbers, labels_of
from quark.errors import ConfigError
from quark.jobs.folders.compared.boxes import ImagesWithBoxes, mean_average_precision
from quark.jobs.folders.compared.task_scores import ACCURACY, MAP, TaskScores, check_metric, own_metric
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.calibration.data.path_reader import PathDataReader
from quark.onnx.graph.sessions import run_sample

FileTask = Callable[[Sequence[Any], Iterable[Feed]], TaskScores]
"""Takes the sessions of both models, and the samples."""


def file_task(metric: str | None, reader: PathDataReader, boxes: str | None = None) -> FileTask | None:
    """The task of data and a metric; None without a metric.

    Args:
        metric: See `check_metric`.
        reader: The samples.
        boxes: Which outputs are boxes; see `BoxOutputs.parse`.

    Raises:
        ConfigError: The metric is none, or one of folders.
        CalibrationError: The images have no labels.
    """
    check_metric(metric)
    if boxes is not None and metric != MAP:
        raise ConfigError(f"--boxes says which outputs are boxes, for --metric {MAP}, which is not asked for.")
    if metric is None:
        return None
    if ":" in metric:
        return partial(_own, own_metric(metric), metric)
    if metric not in (ACCURACY, MAP) or not reader.path.is_dir():
        raise ConfigError(
            f"--metric {metric} of an ONNX file and {reader.path}. Possible: {ACCURACY} with a folder of images that "
            f"have labels, {MAP} with one of images with boxes, or MODULE:FUNCTION."
        )
    place, *files = reader.files
    if metric == MAP:
        images = ImagesWithBoxes.read(place, files)
        resizing = None if reader.preprocessing is None else reader.preprocessing.resizing
        return partial(mean_average_precision, images, boxes, resizing)
    return partial(_accuracy, labels_of(place, files), str(place))


def _own(score: Callable[[Any, Any], float], name: str, sessions: Sequence[Any], feeds: Iterable[Feed]) -> TaskScores:
    samples = list(feeds)
    before, after = (score(session, samples) for session in sessions)
    return TaskScores(f"{len(samples)} sample{'s' if len(samples) != 1 else ''}", {name: (before, after)})


def _accuracy(labels: Sequence[str], place: str, sessions: Sequence[Any], feeds: Iterable[Feed]) -> TaskScores:
    """How many images both put into their class, by the largest value of the first output. Raises ConfigError."""
    name, chosen, classes = sessions[0].get_outputs()[0].name, ([], []), 0  # type: tuple[Any, tuple[list[int], list[int]], int]
    for feed in feeds:
        for found, session in zip(chosen, sessions, strict=True):
            (scores,) = run_sample(session, [name], feed)
            if scores.ndim != 2:
                raise ConfigError(
                    f"--metric accuracy: the output {name} has the shape {scores.shape}; needed is one row of classes "
                    "for each image."
                )
            found += scores.argmax(1).tolist()
            classes = scores.shape[1]
    # What a batch leaves out is at the end.
    right = np.array(class_numbers(labels, classes, {}, place))[: len(chosen[0])]
    before, after = (float((np.array(found) == right).mean()) for found in chosen)
    same = float((np.array(chosen[0]) == np.array(chosen[1])).mean())
    return TaskScores(f"{len(right)} image{'s' if len(right) != 1 else ''}", {ACCURACY: (before, after)}, same)
