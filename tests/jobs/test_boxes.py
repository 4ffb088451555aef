"""The mean average precision of detectors: that of pycocotools, of outputs as a user names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

import quark
from quark.errors import CalibrationError, ConfigError
from quark.jobs.folders.compared.boxes import AveragePrecision

PIXELS = "8, 12, 24, 20, 0, 0, 4, 4"
SOME = (51 + 50 / 2) / 101
"""Half of the recall at a precision of 1, the rest at 1/2."""


def test_it_is_that_of_pycocotools() -> None:
    """pycocotools 2.0.11 gives these two figures for these boxes, crowds among them."""
    rng, found = np.random.default_rng(0), AveragePrecision()
    for _ in range(20):
        there: list[tuple[Any, ...]] = []
        guessed: list[tuple[Any, ...]] = []
        for _ in range(int(rng.integers(0, 8))):
            w, h = rng.uniform(5, 40, 2)
            x, y, label = rng.uniform(0, 60), rng.uniform(0, 40), int(rng.integers(0, 3))
            there.append((x, y, x + w, y + h, label, rng.random() < 0.15))
            for _ in range(int(rng.integers(0, 3))):
                box = np.array([x, y, w, h]) + rng.normal(0, rng.uniform(0.01, 4), 4)
                box[2:] = box[:2] + np.maximum(box[2:], 1)
                guessed.append((*box, label if rng.random() < 0.9 else int(rng.integers(0, 4)), rng.random()))
        real, made = (np.array(rows, np.float64).reshape(-1, 6) for rows in (there, guessed))
        found.update((made[:, :4], made[:, 5], made[:, 4]), (real[:, :4], real[:, 4], real[:, 5] > 0))
    assert found.means() == pytest.approx({"mAP": 0.2643360827087011, "mAP at IoU 0.5": 0.6072377680458788}, rel=1e-9)


def detector(path: Path, boxes: str, scores: str = "float[2] s = {0.9, 0.8}", size: int = 2) -> Path:
    """A file that finds the same boxes in each image of 32 x 32."""
    onnx.save(
        onnx.parser.parse_model(f"""
            <ir_version: 8, opset_import: ["" : 17]>
            graph (float[1, 3, 32, 32] image) => (float[2, 4] boxes, float[{size}] conf, int64[2] classes)
            <float[2, 4] b = {{{boxes}}}, {scores}, int64[2] c = {{1, 1}}, float zero = {{0}}> {{
                mean = ReduceMean <keepdims = 0> (image)
                nothing = Mul (mean, zero)
                boxes = Add (b, nothing)
                conf = Add (s, nothing)
                classes = Identity (c)
            }}"""),
        path,
    )
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """An image of 64 x 32, of which half the size is put into the middle of 32 x 32, and one of 32 x 32."""
    (folder := tmp_path / "images").mkdir()
    for name, width in (("a.png", 64), ("b.png", 32)):
        Image.fromarray(np.full((32, width, 3), 90, np.uint8)).save(folder / name)
    boxes = {1: [16, 8, 32, 16], 2: [0, 0, 4, 4]}
    table = {
        "images": [{"id": 1, "file_name": "a.png"}, {"id": 2, "file_name": "b.png"}],
        "annotations": [{"image_id": n, "category_id": 1, "bbox": box} for n, box in boxes.items()],
    }
    (folder / "boxes.json").write_text(json.dumps(table))
    return folder


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        (PIXELS, ""),
        ("8, 12, 16, 8, 0, 0, 4, 4", ",form=xywh"),
        ("0.5, 0.5, 0.5, 0.25, 0.0625, 0.0625, 0.125, 0.125", ",form=cxcywh,unit=unit"),
    ],
    ids=["corners", "sizes", "middles"],
)
def test_a_detector_and_one_whose_box_is_a_line_too_high(boxes: str, said: str, data: Path, tmp_path: Path) -> None:
    before, after = detector(tmp_path / "a.onnx", boxes), detector(tmp_path / "b.onnx", PIXELS.replace("20", "21", 1))
    options: dict[str, Any] = {"data": data, "metric": "map", "resize": "pad", "mean": "0", "std": "1"}
    measured: Any = quark.evaluate(before, before, boxes=f"scores=conf,labels=classes{said}", **options)
    assert measured.task.scores["mAP"] == pytest.approx((SOME, SOME))
    if said:
        return
    other: Any = quark.evaluate(before, after, boxes="scores=conf,labels=classes", **options)
    # IoU of 8 / 9: at eight of ten thresholds, and at two only the least likely of four boxes is right
    assert other.task.scores["mAP"] == pytest.approx((SOME, 0.8 * SOME + 0.2 * 51 / 4 / 101))
    assert other.task.scores["mAP at IoU 0.5"] == pytest.approx((SOME, SOME))


def test_scores_of_each_class_are_boxes_of_each_class(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.onnx"
    detector(file, PIXELS)
    model = onnx.load(file)
    scores = onnx.numpy_helper.from_array(np.array([[0.0, 0.9], [0.0, 0.8]], np.float32), "s")
    model.graph.initializer.remove(next(each for each in model.graph.initializer if each.name == "s"))
    model.graph.initializer.append(scores)
    model.graph.output[1].CopyFrom(onnx.helper.make_tensor_value_info("conf", onnx.TensorProto.FLOAT, [2, 2]))
    onnx.save(model, file)
    measured: Any = quark.evaluate(
        file, file, data=data, metric="map", resize="pad", mean="0", std="1", boxes="scores=conf,labels="
    )
    assert measured.task.scores["mAP"] == pytest.approx((SOME, SOME))


def test_what_holds_no_boxes_is_said(data: Path, tmp_path: Path) -> None:
    file = detector(tmp_path / "a.onnx", PIXELS)
    options: dict[str, Any] = {"data": data, "metric": "map", "resize": "pad", "mean": "0", "std": "1"}
    for said, words in {
        None: "scores=scores is none of boxes, conf, classes",
        "score=conf": "Did you mean 'scores'",
        "scores=conf,labels=classes,form=yxyx": "form=yxyx is none of xyxy",
        "boxes=conf,scores=conf,labels=classes": "Needed are four numbers and a score of each box",
    }.items():
        with pytest.raises(ConfigError, match=words):
            quark.evaluate(file, file, boxes=said, **options)
    with pytest.raises(ConfigError, match="which is not asked for"):
        quark.evaluate(file, file, data=data, resize="pad", boxes="scores=conf")
    (data / "boxes.json").write_text("{}")
    with pytest.raises(CalibrationError, match="is no COCO file"):
        quark.evaluate(file, file, **options)
    image = {"file_name": "0.png", "id": 0}
    for boxes, words in (([], "has no box"), ([[0, 0, 1], [1, 1, 2, 2, 3]], "is no COCO"), ([[0, 0, 1e999, 1]], "NaN")):
        rows = [{"image_id": 0, "category_id": 0, "bbox": box} for box in boxes]
        (data / "boxes.json").write_text(json.dumps({"images": [image], "annotations": rows}))
        with pytest.raises(CalibrationError, match=words):
            quark.evaluate(file, file, **options)
    (data / "boxes.json").unlink()
    with pytest.raises(CalibrationError, match="is not there. Needed are the boxes"):
        quark.evaluate(file, file, **options)
