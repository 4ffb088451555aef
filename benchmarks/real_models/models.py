"""The models, where they lie in their wheels, the samples made for them, and the metric of each task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Feeds = list[dict[str, Array]]

CALIBRATION, HELD_OUT = 16, 32
"""Samples. The outputs of a classifier are near 0 or 1 for most: of eight of them, two made up all of the noise."""
SCORE, IOU, MASK = 0.25, 0.5, 0.3
"""Least score of a box, the overlap that makes two boxes one, and the least score of a pixel of text."""


@dataclass(frozen=True)
class Model:
    """One model.

    Attributes:
        path: Its file, from site-packages on.
        input: The name of its input.
        samples: (count, seed, site-packages) -> samples, of one row each.
        metric: What the task counts, and the function (float output, quantized output) -> (hits, of how many).
    """

    path: str
    input: str
    samples: Callable[[int, int, Path], list[Array]]
    metric: tuple[str, Callable[[Array, Array], tuple[float, float]]]

    def feeds(self, site: Path) -> tuple[Feeds, Feeds]:
        """Calibration samples, and held-out ones of another seed."""
        counts = ((CALIBRATION, 0), (HELD_OUT, 1))
        first, second = ([{self.input: x} for x in self.samples(n, seed, site)] for n, seed in counts)
        return first, second


def crops(height: int, width: int, mean: float, std: float) -> Callable[[int, int, Path], list[Array]]:
    """Random parts of scikit-learn's two photographs, scaled to (1, 3, height, width) and (x - mean) / std."""

    def make(count: int, seed: int, _: Path) -> list[Array]:
        from sklearn.datasets import load_sample_images

        random, photographs = np.random.default_rng(seed), load_sample_images().images
        found = []
        for number in range(count):
            photograph = photographs[number % len(photographs)]
            share = random.uniform(0.3, 1)
            tall, wide = (int(size * share) for size in photograph.shape[:2])
            top, left = (
                random.integers(0, size - part + 1)
                for size, part in zip(photograph.shape[:2], (tall, wide), strict=True)
            )
            # The nearest pixel of each place: no library scales for us, and the models see sharper edges.
            rows, columns = (np.arange(n) * part // n for n, part in ((height, tall), (width, wide)))
            pixels = photograph[top : top + tall, left : left + wide][rows][:, columns] / 255
            found.append(((pixels - mean) / std).transpose(2, 0, 1)[None].astype(np.float32))
        return found

    return make


WORDS = ("quick brown fox", "lazy dogs", "Hotel", "seven wizards", "Total 1,299.00", "PARIS 2026", "brew", "potions")


def written(height: int, width: int, mean: float, std: float, lines: int) -> Callable[[int, int, Path], list[Array]]:
    """Words in the font of Pillow on a plain ground, at most `lines` of them; as (1, 3, height, width), scaled."""

    def make(count: int, seed: int, _: Path) -> list[Array]:
        from PIL import Image, ImageDraw, ImageFont

        random, found = np.random.default_rng(seed), []
        for _number in range(count):
            ground, ink = (tuple(int(v) for v in random.integers(*shades, 3)) for shades in ((140, 255), (0, 90)))
            picture = Image.new("RGB", (width, height), ground)
            for _line in range(random.integers(1, lines + 1)):
                text = " ".join(random.choice(WORDS, random.integers(1, 3)))
                place = (int(random.integers(4, 8 + (lines > 1) * width // 2)), int(random.integers(0, height - 36)))
                ImageDraw.Draw(picture).text(place, text, ink, ImageFont.load_default(int(random.integers(20, 30))))
            pixels = np.asarray(picture) / 255 + random.normal(0, 0.02, (height, width, 3))
            found.append(((pixels - mean) / std).transpose(2, 0, 1)[None].astype(np.float32))
        return found

    return make


def file_ends(count: int, seed: int, site: Path) -> list[Array]:
    """The first and last 1024 bytes of files of the environment, one of each suffix after the other."""
    by_suffix: dict[str, list[Path]] = {}
    for file in sorted(path for path in site.rglob("*.*") if path.is_file() and path.stat().st_size > 3000):
        by_suffix.setdefault(file.suffix, []).append(file)
    random = np.random.default_rng(seed)
    # Files of even places calibrate, files of odd ones are held out.
    mixed = [random.choice(np.asarray(files[seed % 2 :: 2], object)) for files in by_suffix.values() if len(files) > 1]
    ends = [(data := file.read_bytes())[:1024] + data[-1024:] for file in (mixed * count)[:count]]
    return [np.frombuffer(end, np.uint8).astype(np.int32)[None] for end in ends]


def box_f1(x: Array, y: Array) -> tuple[float, float]:
    """2 x matches, of boxes in both: (1, 4 + classes, places), a box by its middle and size; greedy, best first."""
    first, second = _boxes(x[0]), _boxes(y[0])
    free, matches = list(second), 0
    for box in first:
        best = max(free, key=lambda other: _iou(box, other), default=None)
        if best is not None and _iou(box, best) >= IOU:
            free.remove(best)
            matches += 1
    return 2 * matches, len(first) + len(second)


def _boxes(output: Array) -> list[tuple[float, ...]]:
    """(class, left, top, right, bottom) of each box over SCORE that no better one of its class overlaps."""
    scores, kinds = output[4:].max(0), output[4:].argmax(0)
    kept: list[tuple[float, ...]] = []
    for place in np.argsort(-scores)[: int((scores > SCORE).sum())]:
        x, y, w, h = (float(value) for value in output[:4, place])
        box = (float(kinds[place]), x - w / 2, y - h / 2, x + w / 2, y + h / 2)
        if all(_iou(box, other) < IOU for other in kept):
            kept.append(box)
    return kept


def _iou(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Intersection over union; 0 for boxes of two classes."""
    wide, tall = (max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (1, 2))
    areas = [(box[3] - box[1]) * (box[4] - box[2]) for box in (a, b)]
    return wide * tall / (sum(areas) - wide * tall) if a[0] == b[0] and wide * tall else 0.0


def mask_iou(x: Array, y: Array) -> tuple[float, float]:
    """Pixels of text in both, of those in either."""
    first, second = x > MASK, y > MASK
    return float((first & second).sum()), float((first | second).sum())


def same_class(x: Array, y: Array) -> tuple[float, float]:
    """Rows whose largest score is at one place."""
    return float((x.argmax(-1) == y.argmax(-1)).sum()), float(x[..., 0].size)


def same_text(x: Array, y: Array) -> tuple[float, float]:
    """Rows that read alike: (batch, steps, letters), repetitions and the blank 0 dropped."""
    return float(sum(_text(a) == _text(b) for a, b in zip(x, y, strict=True))), float(len(x))


def _text(scores: Array) -> list[int]:
    best = scores.argmax(-1).tolist()
    return [letter for before, letter in zip([0, *best[:-1]], best, strict=True) if letter and letter != before]


_OCR = "rapidocr_onnxruntime/models/"
_TEXT = written(48, 192, 0.5, 0.5, lines=1)
_PAGE = written(320, 320, 0.485, 0.225, lines=6)
MODELS: dict[str, Model] = {
    "YOLOv8n": Model("nudenet/320n.onnx", "images", crops(320, 320, 0, 1), ("box F1", box_f1)),
    "OCR detection": Model(_OCR + "ch_PP-OCRv4_det_infer.onnx", "x", _PAGE, ("mask IoU", mask_iou)),
    "OCR recognition": Model(_OCR + "ch_PP-OCRv4_rec_infer.onnx", "x", _TEXT, ("text", same_text)),
    "OCR direction": Model(_OCR + "ch_ppocr_mobile_v2.0_cls_infer.onnx", "x", _TEXT, ("class", same_class)),
    "magika": Model("magika/models/standard_v3_3/model.onnx", "bytes", file_ends, ("class", same_class)),
}
