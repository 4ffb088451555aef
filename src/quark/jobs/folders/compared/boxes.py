"""Boxes that a detector finds, beside those that are there: the mean average precision of COCO.

A found box is right at a threshold t if it has the class of a box that is there, no likelier one has taken that, and

    IoU = area of both together / area of either one >= t

With found boxes in the order of their scores, precision is the share that is right of the first n, and recall the share
of the boxes that are there which the first n find. Average precision is the mean, over 101 recalls from 0 to 1, of the
largest precision at that recall or above; mAP is the mean of it over classes and t = .5, .55, ... .95.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from quark.base.data_files.images import Resizing, open_image
from quark.base.json_objects import plain_json
from quark.errors import CalibrationError, ConfigError, did_you_mean, one_line
from quark.jobs.folders.compared.task_scores import TaskScores
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.graph.sessions import run_sample

BOXES = "boxes.json"
"""Beside images: which boxes are in them, as COCO has it."""
THRESHOLDS = np.arange(0.5, 0.96, 0.05)
RECALLS = np.linspace(0, 1, 101)
MOST = 100
"""Boxes of an image that count, those of the largest scores."""
FORMS = ("xyxy", "xywh", "cxcywh")
"""Corners; a corner and the size; the middle and the size."""
UNITS = ("pixels", "unit")
"""Coordinates of the input of the model, or 0 to 1."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class BoxOutputs:
    """Where a detector gives boxes, after suppression of those that overlap.

    Attributes:
        boxes: Output with four numbers of each box: (boxes, 4), or (images, boxes, 4).
        scores: Output with a score of each box, or, without `labels`, one for each box and class.
        labels: Output with the class of each box, a `category_id` of the data; "": none.
        form: One of FORMS.
        unit: One of UNITS.
    """

    boxes: str = "boxes"
    scores: str = "scores"
    labels: str = "labels"
    form: str = FORMS[0]
    unit: str = UNITS[0]

    @classmethod
    def parse(cls, text: str | None, outputs: Sequence[str]) -> BoxOutputs:
        """Of "boxes=dets,scores=conf,labels=,form=xywh,unit=unit"; what is not said is as above.

        Raises ConfigError for other words, and for outputs that the model does not have.
        """
        said = {}
        for part in text.split(",") if text else ():
            key, found, value = part.strip().partition("=")
            if not found or key not in cls.__dataclass_fields__:
                raise ConfigError(f"--boxes {part!r} is no KEY=VALUE. {did_you_mean(key, cls.__dataclass_fields__)}")
            said[key] = value
        made = cls(**said)
        for key, possible in {
            "form": FORMS,
            "unit": UNITS,
            "boxes": outputs,
            "scores": outputs,
            "labels": outputs,
        }.items():
            value = getattr(made, key)
            if value not in possible and (key, value) != ("labels", ""):
                raise ConfigError(
                    f"--metric map: {key}={value} is none of {', '.join(possible)}. Possible: --boxes "
                    "boxes=OUTPUT,scores=OUTPUT,labels=OUTPUT, with form= and unit=; labels= where scores are of "
                    "classes."
                )
        return made

    def found(self, session: Any, feed: Feed, size: tuple[int, int]) -> list[tuple[Array, Array, Array]]:
        """The corners in pixels, scores and classes that a session finds in each image of a feed.

        Args:
            session: Of ONNX Runtime.
            feed: Its inputs.
            size: Height and width of the input.
        """
        names = [self.boxes, self.scores, *([self.labels] if self.labels else [])]
        given = [np.asarray(x) for x in run_sample(session, names, feed)]
        if given[0].ndim == 2:
            given = [x[None] for x in given]
        shapes = ", ".join(f"{name} {x.shape}" for name, x in zip(names, given, strict=True))
        boxes, scores, *labels = given
        right = boxes.ndim == 3 and boxes.shape[2] == 4 and scores.shape[:2] == boxes.shape[:2]
        if not right or scores.ndim != (2 if labels else 3) or (labels and labels[0].shape != scores.shape):
            raise ConfigError(
                f"--metric map: {shapes}. Needed are four numbers and a score of each box, and its class, or a score "
                "of each class."
            )
        corners = self._corners(boxes.astype(np.float64), size)
        if labels:
            return [*zip(corners, scores, labels[0], strict=True)]
        count, classes = scores.shape[1:]
        every = np.tile(np.arange(classes), count)
        return [(np.repeat(b, classes, 0), s.reshape(-1), every) for b, s in zip(corners, scores, strict=True)]

    def _corners(self, boxes: Array, size: tuple[int, int]) -> Array:
        first, second = boxes[..., :2], boxes[..., 2:]
        if self.form == "cxcywh":
            first, second = first - second / 2, first + second / 2
        elif self.form == "xywh":
            second = first + second
        scale = np.array([size[1], size[0]]) if self.unit == "unit" else 1
        return np.concatenate([first * scale, second * scale], -1)


@dataclass
class AveragePrecision:
    """The found boxes of images beside those that are there; classes that none is of do not count."""

    _found: dict[int, list[tuple[Array, Array, Array]]] = field(default_factory=dict)
    _there: dict[int, int] = field(default_factory=dict)

    def update(self, found: tuple[Array, Array, Array], there: tuple[Array, Array, Array]) -> None:
        """Add an image.

        Args:
            found: Corners (boxes, 4), scores (boxes,) and classes (boxes,).
            there: Corners, classes, and which are crowds, in which found boxes count as neither right nor wrong.
        """
        corners, scores, classes = found
        for label in {*classes.tolist(), *there[1].tolist()}:
            mine, real = classes == label, there[1] == label
            order = np.argsort(-scores[mine], kind="mergesort")[:MOST]
            crowd = there[2][real]
            right, ignored = _matched(corners[mine][order], there[0][real], crowd)
            self._found.setdefault(int(label), []).append((scores[mine][order], right, ignored))
            self._there[int(label)] = self._there.get(int(label), 0) + int((~crowd).sum())

    def means(self) -> dict[str, float]:
        """The mean over classes and all thresholds, and that at an IoU of .5."""
        precisions = []
        for label, count in self._there.items():
            if count:
                scores, right, ignored = (np.concatenate(each, -1) for each in zip(*self._found[label], strict=True))
                precisions.append(_precision(scores, right, ignored, count))
        of_all = np.array(precisions) if precisions else np.zeros((1, len(THRESHOLDS)))
        return {"mAP": float(of_all.mean()), "mAP at IoU 0.5": float(of_all[:, 0].mean())}


def _matched(found: Array, there: Array, crowd: Array) -> tuple[Array, Array]:
    """Which found boxes are right, and which count as neither: (thresholds, boxes) each; the likeliest are first."""
    overlaps = _overlaps(found, there, crowd)
    right = np.zeros((len(THRESHOLDS), len(found)), bool)
    ignored = right.copy()
    for row, threshold in enumerate(THRESHOLDS):
        free = np.ones(len(there), bool)
        for index in range(len(found)):
            own = np.where(free & ~crowd, overlaps[index], -1.0)
            best = int(own.argmax()) if len(own) else -1
            if best >= 0 and own[best] >= min(threshold, 1 - 1e-10):
                right[row, index], free[best] = True, False
            else:
                ignored[row, index] = bool((crowd & (overlaps[index] >= threshold)).any())
    return right, ignored


def _overlaps(found: Array, there: Array, crowd: Array) -> Array:
    """IoU of each found box and each that is there, of a crowd the share of the found box: (found, there)."""
    low = np.maximum(found[:, None, :2], there[None, :, :2])
    high = np.minimum(found[:, None, 2:], there[None, :, 2:])
    both = np.prod(np.clip(high - low, 0, None), -1)
    areas = [np.prod(boxes[:, 2:] - boxes[:, :2], -1) for boxes in (found, there)]
    either = np.where(crowd[None], areas[0][:, None], areas[0][:, None] + areas[1][None] - both)
    return both / np.maximum(either, 1e-12)


def _precision(scores: Array, right: Array, ignored: Array, count: int) -> list[float]:
    """The average precision of a class at each threshold, of which so many boxes are there."""
    order = np.argsort(-scores, kind="mergesort")
    result = []
    for hits, left_out in zip(right[:, order], ignored[:, order], strict=True):
        hits = hits[~left_out]
        total = np.cumsum(hits)
        precision = np.maximum.accumulate((total / np.arange(1, len(hits) + 1))[::-1])[::-1]
        places = np.searchsorted(total / count, RECALLS, side="left")
        result.append(float(np.append(precision, 0.0)[np.minimum(places, len(hits))].mean()))
    return result


@dataclass(frozen=True)
class ImagesWithBoxes:
    """Images and the boxes in them.

    Attributes:
        files: The images, in their order.
        boxes: Of each, the corners in pixels, the classes, and which are crowds.
    """

    files: Sequence[Path]
    boxes: Sequence[tuple[Array, Array, Array]]

    @classmethod
    def read(cls, folder: Path, files: Sequence[Path]) -> ImagesWithBoxes:
        """The boxes of the images of a folder. Raises CalibrationError where there are none, or it is no COCO file."""
        table = folder / BOXES
        if not table.is_file():
            raise CalibrationError(
                f"--metric map: {table} is not there. Needed are the boxes of the images, as COCO has."
            )
        try:
            data = plain_json(table.read_text(encoding="utf-8"))
            names = {Path(each["file_name"]).as_posix(): each["id"] for each in data["images"]}
            of_image: dict[Any, list[Mapping[str, Any]]] = {}
            for each in data["annotations"]:
                of_image.setdefault(each["image_id"], []).append(each)
            there = {image: _boxes(found) for image, found in of_image.items()}
            if not of_image:
                raise ValueError("it has no box, so there is nothing to find")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CalibrationError(
                f"{table} is no COCO file: {type(error).__name__}: {one_line(error)[:100]}."
            ) from None
        ids = [names.get(file.relative_to(folder).as_posix()) for file in files]
        if None in ids:
            raise CalibrationError(f"{table} has no image {files[ids.index(None)].relative_to(folder)}.")
        return cls(files, [there.get(image, _boxes([])) for image in ids])


def _boxes(found: Sequence[Mapping[str, Any]]) -> tuple[Array, Array, Array]:
    """The corners, classes and crowds of annotations of COCO, whose boxes are a corner and the size."""
    boxes = np.array([each["bbox"] for each in found], np.float64).reshape(len(found), 4)
    if not np.isfinite(boxes).all():
        raise ValueError("a bbox is NaN or infinite")
    boxes[:, 2:] += boxes[:, :2]
    return (
        boxes,
        np.array([int(each["category_id"]) for each in found], np.int64),
        np.array([bool(each.get("iscrowd")) for each in found], bool),
    )


def mean_average_precision(
    images: ImagesWithBoxes, said: str | None, resizing: Resizing | None, sessions: Sequence[Any], feeds: Iterable[Feed]
) -> TaskScores:
    """The mean average precision of both models.

    Args:
        images: What is in them.
        said: Which outputs are boxes, as `BoxOutputs.parse` reads it.
        resizing: How the images got the size of the input; None: they had it.
        sessions: Of both models.
        feeds: The images, in their order.

    Raises:
        ConfigError: The outputs hold no boxes.
    """
    outputs = BoxOutputs.parse(said, [each.name for each in sessions[0].get_outputs()])
    both, rest, count = (AveragePrecision(), AveragePrecision()), iter(zip(images.files, images.boxes, strict=True)), 0
    for feed in feeds:
        shape = next(iter(feed.values())).shape
        size = shape[-3:-1] if shape[-1] in (1, 3) else shape[-2:]
        found = [outputs.found(session, feed, size) for session in sessions]
        for index, (file, (corners, classes, crowds)) in enumerate(islice(rest, len(found[0]))):
            if resizing is not None:
                corners = resizing.boxes(corners, open_image(file).size, *size)
            count += 1
            for each, made in zip(both, found, strict=True):
                each.update(made[index], (corners, classes, crowds))
    before, after = (each.means() for each in both)
    return TaskScores(
        f"{count} image{'s' if count != 1 else ''}", {name: (before[name], after[name]) for name in before}
    )
