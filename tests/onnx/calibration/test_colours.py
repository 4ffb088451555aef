"""Images in units that no network reads are refused with the pair that was meant, and what was read is told."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import onnx
import pytest

from quark.errors import ConfigError, FormatError
from quark.onnx import PathDataReader
from quark.onnx.calibration.data.colours import Colours
from tests.models.onnx_zoo import cnn

PIL = pytest.importorskip("PIL.Image")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model beside a folder of images in several formats, and a text."""
    onnx.save(cnn(), tmp_path / "model.onnx")
    (tmp_path / "images").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    for suffix in ("png", "bmp", "tiff", "webp"):
        PIL.fromarray(pixels).save(tmp_path / "images" / f"{suffix}.{suffix}")
    (tmp_path / "images" / "labels.txt").write_text("a")
    return tmp_path


@pytest.mark.parametrize(
    ("mean", "std", "meant"),
    [
        ([127.5], [128.0], "--mean 0.5 --std 0.502"),
        ([0.0], [255.0], "--mean 0 --std 1"),
        ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375], "--mean 0.485,0.456,0.406 --std 0.229,0.224,0.225"),
        ([104.0], [1.0], "--mean 0.4078 --std 0.003922"),
    ],
)
def test_units_of_0_to_255_are_refused_with_the_pair_that_was_meant(
    mean: list[float], std: list[float], meant: str
) -> None:
    with pytest.raises(ConfigError, match=f"would lie from .* In units of 0 to 255, .* they are {meant}"):
        Colours.given(mean, std)


def test_the_usual_pairs_are_taken() -> None:
    for mean, std in (([0.0], [1.0]), ([0.5], [0.5]), ([0.485], [0.229]), ([0.0], [1 / 255])):
        Colours.given(mean, std)


def test_what_was_read_is_told_once_and_other_files_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quark"):
        reader = PathDataReader(folder / "model.onnx", folder / "images", mean=[0.5], std=[0.5])
        found = list(iter(reader.get_next, None))
    assert len(found) == 4 and all(feed["x"].shape == (1, 3, 16, 16) for feed in found)
    assert caplog.text.count("Images are read as RGB, 16x16") == 1 and "from -1 to 1" in caplog.text
    assert "1 files of" in caplog.text and "labels.txt" in caplog.text


def test_a_preprocessor_beside_the_model_says_how_images_are_read(folder: Path) -> None:
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}))
    given = PathDataReader(folder / "model.onnx", folder / "images", mean=[0.5], std=[0.25]).get_next()
    beside = PathDataReader(folder / "model.onnx", folder / "images").get_next()
    assert given is not None and beside is not None and np.array_equal(given["x"], beside["x"])
    file.write_text(json.dumps({"do_normalize": False, "do_rescale": False}))
    raw = PathDataReader(folder / "model.onnx", folder / "images").get_next()
    assert raw is not None and np.allclose(raw["x"], (given["x"] * 0.25 + 0.5) * 255, atol=1e-3)
    file.write_text("[]")
    with pytest.raises(FormatError, match="does not say how images are read"):
        PathDataReader(folder / "model.onnx", folder / "images")
