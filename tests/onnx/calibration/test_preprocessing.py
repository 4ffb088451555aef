"""Images are read as the model or a file beside it says, bit for bit as others do; what no network reads is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import onnx
import pytest

from quark.errors import CalibrationError, ConfigError, FormatError
from quark.onnx import PathDataReader
from quark.onnx.calibration.data.preprocessing import Preprocessing
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
        Preprocessing.given(mean, std)


def test_a_range_that_no_network_reads_is_refused() -> None:
    """Of mean and std in units of 0 to 1 on pixels of 0 to 255, as where the scaling was forgotten."""
    with pytest.raises(ConfigError, match="from -2.118 to 1111, which no network reads"):
        Preprocessing.of("x", [0.485 / 255], [0.229 / 255])
    for wrong in ({"pixel_max": 100.0}, {"order": "GRB"}, {"mean": [0.5]}):
        with pytest.raises(ConfigError, match="1 or 255|RGB or BGR|belong together"):
            Preprocessing.given(**wrong)  # type: ignore[arg-type]


def test_the_usual_pairs_are_taken() -> None:
    for mean, std in (([0.0], [1.0]), ([0.5], [0.5]), ([0.485], [0.229]), ([0.0], [1 / 255])):
        Preprocessing.given(mean, std)


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


# What others read. ----------------------------------------------------------------------------------------------------

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "ViT": ("ViT", {}),
    "CLIP": ("CLIP", {}),
    "ConvNext": ("ConvNext", {"size": {"shortest_edge": 224}}),
    "ConvNext, large": ("ConvNext", {}),
    "MobileNetV2": ("MobileNetV2", {}),
    "EfficientNet": ("EfficientNet", {"rescale_offset": True, "rescale_factor": 1 / 127.5, "do_normalize": False}),
    "MobileViT, BGR": ("MobileViT", {"size": {"shortest_edge": 288}}),
    "DeiT": ("DeiT", {}),
    "SigLIP": ("Siglip", {}),
    "PoolFormer": ("PoolFormer", {}),
}


def model_of(shape: list[int | str], **metadata: str) -> onnx.ModelProto:
    """A model that reads images of a shape."""
    info = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)
    made = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [info], [made])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    onnx.helper.set_model_props(model, metadata)
    return model


def photos(folder: Path) -> list[object]:
    folder.mkdir()
    made = []
    for index, (width, height) in enumerate([(61, 40), (40, 61), (299, 230)]):
        pixels = np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8)
        made.append(PIL.fromarray(pixels))
        made[-1].save(folder / f"{index}.png")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_are_those_of_the_image_processor_of_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    name, changed = FAMILIES[family]
    processor = getattr(transformers, f"{name}ImageProcessorPil")(**changed)
    processor.save_pretrained(tmp_path)
    expected = [processor(image, return_tensors="np")["pixel_values"] for image in photos(tmp_path / "images")]
    (tmp_path / "onnx").mkdir()
    for file, shape in (("model.onnx", list(expected[0].shape)), ("onnx/model.onnx", ["n", 3, "h", "w"])):
        onnx.save(model_of(shape), tmp_path / file)
        reader = PathDataReader(tmp_path / file, tmp_path / "images")
        assert all(np.array_equal(feed["x"], array) for feed, array in zip(reader, expected, strict=True))
        said = reader.preprocessing.as_options if reader.preprocessing else {}
        pair = {key: [float(value) for value in said.pop(key).split(",")] for key in ("mean", "std")}
        onnx.save(model_of(shape), tmp_path / "images.onnx")
        again = PathDataReader(tmp_path / "images.onnx", tmp_path / "images", **pair, **said)  # type: ignore[arg-type]
        assert all(np.array_equal(feed["x"], array) for feed, array in zip(again, expected, strict=True))


IMAGENET_255 = "123.675,116.28,103.53", "58.395,57.12,57.375"
SAYING: dict[str, tuple[dict[str, str], dict[str, str], dict[str, str]]] = {
    "Ultralytics": (
        {"author": "Ultralytics", "task": "detect", "stride": "32"},
        {},
        {"mean": "0", "std": "1", "resize": "pad", "colours": "rgb"},
    ),
    "ONNX": (
        {"Image.BitmapPixelFormat": "Bgr8", "Image.NominalPixelRange": "Normalized_1_1"},
        {},
        {"mean": "0.5", "std": "0.5", "colours": "bgr"},
    ),
    "OpenVINO's model API": (
        {
            "model_info mean_values": IMAGENET_255[0].replace(",", " "),
            "model_info scale_values": IMAGENET_255[1].replace(",", " "),
            "model_info reverse_input_channels": "True",
            "model_info resize_type": "fit_to_window_letterbox",
            "model_info pad_value": "0",
        },
        {},
        {"mean": "0.485,0.456,0.406", "std": "0.229,0.224,0.225", "resize": "pad,fill=0", "colours": "rgb"},
    ),
    "OpenVINO's model zoo": (
        {},
        {
            "model.yml": f"model_optimizer_args:\n  - --input=data\n  - --mean_values=data[{IMAGENET_255[0]}]\n"
            f"  - --scale_values=data[{IMAGENET_255[1]}]\n  - --output=prob\n"
        },
        {"mean": "0.485,0.456,0.406", "std": "0.229,0.224,0.225", "colours": "bgr"},
    ),
    "timm": (
        {},
        {
            "config.json": json.dumps(
                {
                    "pretrained_cfg": {
                        "input_size": [3, 224, 224],
                        "interpolation": "bicubic",
                        "crop_pct": 0.9,
                        "mean": [0.5, 0.5, 0.5],
                        "std": [0.25, 0.25, 0.25],
                    }
                }
            )
        },
        {
            "mean": "0.5,0.5,0.5",
            "std": "0.25,0.25,0.25",
            "resize": "crop:224x224,scale=248,filter=bicubic",
            "colours": "rgb",
        },
    ),
}


@pytest.mark.parametrize("who", SAYING)
def test_metadata_and_files_of_others_say_how_images_are_read(who: str, tmp_path: Path) -> None:
    metadata, files, options = SAYING[who]
    onnx.save(model_of(["n", 3, 224, 224], **metadata), tmp_path / "m.onnx")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    photos(tmp_path / "images")
    found = PathDataReader(tmp_path / "m.onnx", tmp_path / "images").preprocessing
    assert found is not None and found.as_options == options


def test_what_is_given_replaces_what_is_said_and_bgr_is_the_other_order(folder: Path) -> None:
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5] * 3, "size": {"longest_edge": 16}}))
    with pytest.raises(FormatError, match=r"resizes images in a way that quark does not.*--resize"):
        PathDataReader(folder / "model.onnx", folder / "images")
    rgb, bgr, raw = (
        PathDataReader(folder / "model.onnx", folder / "images", resize="stretch", **more).get_next()  # type: ignore[arg-type]
        for more in ({}, {"colours": "bgr"}, {"pixel_max": 255, "colours": "bgr"})
    )
    assert rgb is not None and bgr is not None and raw is not None
    mean = np.array([0.1, 0.2, 0.3], np.float32)[:, None, None]
    pixels = (rgb["x"] * 0.5 + mean) * 255
    np.testing.assert_allclose((bgr["x"] * 0.5 + mean) * 255, pixels[:, ::-1], atol=1e-3)
    np.testing.assert_allclose(raw["x"], pixels[:, ::-1], atol=1e-3)


def test_images_of_one_colour_each_are_refused(tmp_path: Path) -> None:
    onnx.save(cnn(), tmp_path / "model.onnx")
    (tmp_path / "images").mkdir()
    for grey in (0, 90):
        PIL.fromarray(np.full((16, 16, 3), grey, np.uint8)).save(tmp_path / "images" / f"{grey}.png")
    with pytest.raises(CalibrationError, match="Each image of .* is of one colour"):
        list(PathDataReader(tmp_path / "model.onnx", tmp_path / "images", mean=[0.5], std=[0.5]))
