"""Calibration data: readers, iterables, folders and files; and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.core.spec import LayerSpec, spec
from quark.errors import CalibrationError, ConfigError, MissingDependencyError, NotSupportedError
from quark.onnx import (
    CachedDataReader,
    CalibMethod,
    CalibrationDataReader,
    Int8Spec,
    PathDataReader,
    QConfig,
    QLayerConfig,
    RandomDataReader,
)
from quark.onnx.calibration.data.inputs import Feed, model_inputs
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.settings import Settings, SpecSettings
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.quantizer import ModelQuantizer
from quark.onnx.search.settle import quantize
from tests.models.onnx_zoo import Reader, cnn, images, mlp, vectors

S8 = spec("int8")
A8W8 = Settings(SpecSettings(LayerSpec(weight=S8, input=S8)))


def two_inputs(batch: int | str = "n") -> onnx.ModelProto:
    """a [batch, 3] float and index [batch, 2] int64; y = a + mean of index."""
    inputs = [
        helper.make_tensor_value_info("a", TensorProto.FLOAT, [batch, 3]),
        helper.make_tensor_value_info("index", TensorProto.INT64, [batch, 2]),
    ]
    nodes = [
        helper.make_node("Cast", ["index"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["f"], ["m"], axes=[1]),
        helper.make_node("Add", ["a", "m"], ["y"]),
    ]
    output = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 3])]
    return helper.make_model(
        helper.make_graph(nodes, "g", inputs, output), opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )


def image_model(shape: list[Any], dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    value = helper.make_tensor_value_info("x", dtype, shape)
    output = helper.make_tensor_value_info("y", dtype, shape)
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def rows(count: int, seed: int = 3) -> Feed:
    random = np.random.default_rng(seed)
    return {"a": random.normal(size=(count, 3)).astype(np.float32), "index": random.integers(0, 9, (count, 2))}


def scales(data: Any = None, path: Path | None = None) -> dict[str, float]:
    """Activation scales of `cnn` under these data: the same data give the same scales."""
    config = QConfig.get_default_config("A8W8")
    model = ModelQuantizer(config).quantize_model(cnn(), None, data, None if path is None else str(path))
    assert model is not None
    return {i.name: float(numpy_helper.to_array(i)) for i in model.graph.initializer
            if i.name.endswith("_scale") and not i.dims}  # fmt: skip


# The same data, however they come. ------------------------------------------------------------------------------------


def generator() -> Iterator[Feed]:
    yield from images()


def written(folder: Path, form: str) -> Path:
    """`images()` on disk."""
    feeds = [feed["x"] for feed in images()]
    (folder / "x" if form == "by input" else folder).mkdir(parents=True)
    if form == "one file":
        np.savez(folder / "all.npz", x=np.concatenate(feeds))
        return folder / "all.npz"
    for index, array in enumerate(feeds):
        if form == "npz":
            np.savez(folder / f"{index}.npz", array)
        else:
            np.save(folder / ("x" if form == "by input" else "") / f"{index}.npy", array)
    return folder


@pytest.mark.slow
def test_all_kinds_of_data_give_the_same_scales(tmp_path: Path) -> None:
    from onnxruntime.quantization.calibrate import CalibrationDataReader as TheirReader

    class Theirs(Reader, TheirReader):
        pass

    expected = scales(Reader(images()))
    assert len(expected) > 10
    assert scales(images()) == scales(generator()) == scales([feed["x"] for feed in images()]) == expected
    assert scales(Theirs(images())) == scales(CachedDataReader(Reader(images()))) == expected
    for form in ("npy", "npz", "by input", "one file"):
        assert scales(path=written(tmp_path / form, form)) == expected, form
    assert scales(images(3)) != expected


def test_torch_tensors_are_taken() -> None:
    torch = pytest.importorskip("torch")
    tensors = [{"x": torch.from_numpy(feed["x"])} for feed in images()]
    assert scales(tensors) == scales(Reader(tensors)) == scales(images())


def test_random_data_obey_their_options() -> None:
    options = {"UseRandomData": True, "RandomDataReaderInputShape": {"x": [2, 3, 16, 16]},
               "RandomDataReaderInputDataRange": {"x": [-0.5, 4]}}  # fmt: skip
    minmax = Int8Spec(calibration_method=CalibMethod.MinMax)
    settings = lower(QConfig(QLayerConfig(input_tensors=minmax, weight=minmax), extra_options=options))
    quantized = to_proto(quantize(load(cnn()), settings))
    scale = next(float(numpy_helper.to_array(i)) for i in quantized.graph.initializer if i.name == "x_scale")
    assert 3.9 / 127 < scale <= 4 / 127
    (feed,) = list(RandomDataReader(two_inputs(), {"a": [4, 3]}, {"index": [5, 6]}))
    assert feed["a"].shape == (4, 3) and feed["index"].shape == (1, 2)
    assert set(np.unique(feed["index"])) <= {5, 6} and feed["index"].dtype == np.int64
    (again,) = list(RandomDataReader(two_inputs(), {"a": [4, 3]}))
    assert np.array_equal(again["a"], feed["a"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"b": [1, 3]},), "'b' is no input"),
        (({"a": [1, 4]},), r"\[1, 4\] does not fit the input a: float32"),
        (({}, {"a": [2, 1]}), "range of a"),
    ],
)
def test_wrong_options_of_random_data_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RandomDataReader(two_inputs(), *arguments)


def test_a_cached_reader_starts_again() -> None:
    cached = CachedDataReader(Reader(images()), data_size=3, convert_nchw_to_nhwc=True)
    assert len(cached) == 3 == len(list(cached)) and cached.get_next() is None
    cached.reset_iter()
    first = cached.get_next()
    assert first is not None and np.array_equal(first["x"], images()[0]["x"].transpose(0, 2, 3, 1))
    with pytest.raises(NotSupportedError, match="quantize_fp16"):
        CachedDataReader(Reader(images()), quantize_fp16=True)


# Files. ---------------------------------------------------------------------------------------------------------------


def test_rows_of_one_file_are_cut_into_batches(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", **rows(7))
    for model, size, expected in (
        (two_inputs(), None, [1] * 7),
        (two_inputs(), 3, [3, 3, 1]),
        (two_inputs(7), None, [7]),
    ):
        feeds = list(PathDataReader(model, tmp_path / "all.npz", batch_size=size))
        assert [len(feed["a"]) for feed in feeds] == expected
        for name, array in rows(7).items():
            assert np.array_equal(np.concatenate([feed[name] for feed in feeds]), array)
    with pytest.raises(CalibrationError, match=r"'a' is float32 \[1, 3\].*a: float32 \[2, 3\]"):
        list(PathDataReader(two_inputs(2), tmp_path / "all.npz"))


def recurrent(batch: int | str | None = None) -> onnx.ModelProto:
    """As a voice detector has them: input [batch, time], state [2, batch, 3] and a rate, which is a scalar."""
    inputs = [
        helper.make_tensor_value_info("input", TensorProto.FLOAT, [batch, None]),
        helper.make_tensor_value_info("state", TensorProto.FLOAT, [2, batch, 3]),
        helper.make_tensor_value_info("rate", TensorProto.INT64, []),
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, batch, 3])
    graph = helper.make_graph([helper.make_node("Identity", ["state"], ["y"])], "g", inputs, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize("size", [None, 4])
def test_a_state_whose_batch_is_not_first_is_cut_with_the_input(size: int | None, tmp_path: Path) -> None:
    """Against the arrays that were written: sample i has row i of the input, column i of the state, and the rate."""
    random = np.random.default_rng(0)
    whole = {
        "input": random.normal(size=(10, 5)).astype(np.float32),
        "state": random.normal(size=(2, 10, 3)).astype(np.float32),
        "rate": np.array(16000),
    }
    np.savez(tmp_path / "all.npz", **whole)
    reader = PathDataReader(recurrent(), tmp_path / "all.npz", batch_size=size)
    feeds = list(iter(reader.get_next, None))
    assert [len(feed["input"]) for feed in feeds] == ([1] * 10 if size is None else [4, 4, 2])
    np.testing.assert_array_equal(np.concatenate([feed["input"] for feed in feeds]), whole["input"])
    np.testing.assert_array_equal(np.concatenate([feed["state"] for feed in feeds], 1), whole["state"])
    assert all(feed["rate"].shape == () and feed["rate"] == 16000 for feed in feeds)


def test_a_batch_never_mixes_two_values_of_a_scalar(tmp_path: Path) -> None:
    for index, rate in enumerate((8000, 16000)):
        arrays = {"input": np.ones((3, 5), np.float32), "state": np.ones((2, 3, 3), np.float32)}
        np.savez(tmp_path / f"{index}.npz", rate=np.array(rate), **arrays)
    reader = PathDataReader(recurrent(), tmp_path, batch_size=2)
    feeds = [(len(feed["input"]), int(feed["rate"])) for feed in iter(reader.get_next, None)]
    assert feeds == [(2, 8000), (1, 8000), (2, 16000), (1, 16000)]


def test_inputs_that_differ_in_samples_are_named_with_their_shapes(tmp_path: Path) -> None:
    arrays = {"input": np.ones((3, 5), np.float32), "state": np.ones((2, 4, 3), np.float32)}
    np.savez(tmp_path / "all.npz", rate=np.array(8000), **arrays)
    with pytest.raises(CalibrationError, match=r"differ in both: .*input \[3, 5\], state \[2, 4, 3\]"):
        PathDataReader(recurrent(), tmp_path / "all.npz").get_next()


def test_folders_hold_a_sample_in_each_file(tmp_path: Path) -> None:
    data = rows(5)
    for name, array in data.items():
        (tmp_path / "by input" / name).mkdir(parents=True)
        for index, row in enumerate(array):
            np.save(tmp_path / "by input" / name / f"{index}.npy", row)
    (tmp_path / "npz").mkdir()
    for index in range(5):
        np.savez(tmp_path / "npz" / f"{index}.npz", **{name: array[index : index + 1] for name, array in data.items()})
    for folder in ("by input", "npz"):
        reader = PathDataReader(two_inputs(), tmp_path / folder)
        feeds = list(reader)
        assert len(feeds) == 5 and all(np.array_equal(feeds[i][n], data[n][i : i + 1]) for i in range(5) for n in data)
        reader.rewind()
        assert len(list(reader)) == 5
    assert [len(f["a"]) for f in PathDataReader(two_inputs(), tmp_path / "npz", batch_size=2)] == [2, 2, 1]
    (tmp_path / "by input" / "index" / "4.npy").unlink()
    with pytest.raises(CalibrationError, match="5 files.*4"):
        PathDataReader(two_inputs(), tmp_path / "by input")


def test_input_shape_gives_flat_arrays_their_shape(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", images()[0]["x"].ravel())
    (feed,) = list(PathDataReader(cnn(), tmp_path, [4, 3, 16, 16]))
    assert np.array_equal(feed["x"], images()[0]["x"])
    with pytest.raises(CalibrationError, match="cannot reshape"):
        list(PathDataReader(cnn(), tmp_path, [5, 3, 16, 16]))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "grey"])
def test_images_are_fed_in_the_models_layout(layout: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)
    image.fromarray(pixels).save(tmp_path / "0.png")
    mean, std = np.array([0.4, 0.5, 0.6], np.float32), np.array([0.2, 0.25, 0.3], np.float32)
    if layout == "grey":
        (feed,) = list(PathDataReader(image_model([1, 1, 6, 5], TensorProto.UINT8), tmp_path))
        assert np.array_equal(feed["x"][0, 0], np.asarray(image.fromarray(pixels).convert("L")))
        return
    shape = ["n", 3, 6, 5] if layout == "NCHW" else ["n", 6, 5, 3]
    (feed,) = list(PathDataReader(image_model(shape), tmp_path, mean=mean, std=std))
    expected = (pixels / 255.0 - mean) / std
    np.testing.assert_allclose(feed["x"][0], expected.transpose(2, 0, 1) if layout == "NCHW" else expected, atol=1e-5)
    with pytest.raises(CalibrationError, match="mean and std"):
        list(PathDataReader(image_model(shape), tmp_path))
    with pytest.raises(ConfigError, match="one number or 3"):
        list(PathDataReader(image_model(shape), tmp_path, mean=mean[:2], std=std[:2]))
    with pytest.raises(ConfigError, match="std of images"):
        PathDataReader(image_model(shape), tmp_path, mean=mean, std=[0.2, 0, 0.1])
    with pytest.raises(CalibrationError, match="no axis of 1 or 3 colours"):
        list(PathDataReader(image_model([1, 7, 6, 5]), tmp_path, mean=mean, std=std))
    with pytest.raises(CalibrationError, match=r"6x5 pixels.*\[1, 3, 8, 8\].*--resize.*stretch, crop, pad"):
        list(PathDataReader(image_model([1, 3, 8, 8]), tmp_path, mean=mean, std=std))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "open"])
def test_images_are_resized_as_the_model_was_trained(layout: str, tmp_path: Path) -> None:
    """A wide image, red on the left and blue on the right, for an input of 8 x 8; grey above and below, if padded."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((10, 40, 3), np.uint8)
    pixels[:, :20, 0], pixels[:, 20:, 2] = 200, 100
    image.fromarray(pixels).save(tmp_path / "0.png")
    shape: list[Any] = {"NCHW": [1, 3, 8, 8], "NHWC": [1, 8, 8, 3], "open": ["n", 3, "h", "w"]}[layout]
    size = ":8x8" if layout == "open" else ""
    seen = {}
    for way in ("stretch", "crop", "pad"):
        (feed,) = list(PathDataReader(image_model(shape, TensorProto.UINT8), tmp_path, resize=way + size))
        seen[way] = feed["x"][0].transpose(1, 2, 0) if layout != "NHWC" else feed["x"][0]
        assert seen[way].shape == (8, 8, 3)
    red, blue, grey = [200, 0, 0], [0, 0, 100], [114, 114, 114]
    for way in ("stretch", "crop"):
        assert (seen[way][:, :2] == red).all() and (seen[way][:, 6:] == blue).all()
    assert (seen["pad"][[0, 1, 2, 5, 6, 7]] == grey).all()
    assert (seen["pad"][3:5, :2] == red).all() and (seen["pad"][3:5, 6:] == blue).all()
    # The middle of the crop is a quarter as wide as the image: nothing of it is blurred as much as when stretched.
    assert np.abs(seen["crop"][:, 3:5].astype(int) - seen["stretch"][:, 3:5]).max() > 0


def test_what_resize_cannot_be_is_an_error(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.zeros((6, 5), np.uint8)).save(tmp_path / "0.png")
    (grey,) = list(PathDataReader(image_model([1, 1, 8, 8], TensorProto.UINT8), tmp_path, resize="pad"))
    assert grey["x"].shape == (1, 1, 8, 8) and grey["x"][0, 0, 0, [0, 7]].tolist() == [0, 114]
    for wrong, match in {"padd": "Did you mean 'pad'", "pad:8": "HEIGHTxWIDTH", "pad:": "HEIGHTxWIDTH"}.items():
        with pytest.raises(ConfigError, match=match):
            PathDataReader(image_model([1, 3, 8, 8]), tmp_path, resize=wrong)
    with pytest.raises(ConfigError, match=r"has no size of its own.*pad:480x640"):
        list(PathDataReader(image_model([1, 3, "h", "w"], TensorProto.UINT8), tmp_path, resize="pad"))
    with pytest.raises(ConfigError, match=r"9x8 is not the size of the input x: uint8 \[1, 3, 8, 8\]"):
        list(PathDataReader(image_model([1, 3, 8, 8], TensorProto.UINT8), tmp_path, resize="pad:9x8"))
    np.save(tmp_path / "x.npy", np.zeros((1, 3, 8, 8), np.float32))
    with pytest.raises(ConfigError, match="resize is for images"):
        PathDataReader(image_model([1, 3, 8, 8]), tmp_path / "x.npy", resize="pad")


def test_images_without_pillow_name_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    (tmp_path / "0.png").write_bytes(b"")
    with pytest.raises(MissingDependencyError, match=r"pip install 'openquark\[images\]'"):
        list(PathDataReader(cnn(), tmp_path))


# What does not fit. ---------------------------------------------------------------------------------------------------


def bad_folder(root: Path, name: str) -> Path:
    folder = root / name
    folder.mkdir()
    good = images()[0]["x"]
    if name == "other files":
        (folder / "labels.csv").write_text("0")
    elif name == "truncated":
        np.save(folder / "0.npy", good)
        (folder / "0.npy").write_bytes((folder / "0.npy").read_bytes()[:-8])
    elif name == "text":
        (folder / "0.npy").write_text("no array")
    elif name == "pickle":
        np.save(folder / "0.npy", np.array([{}]), allow_pickle=True)
    elif name == "broken npz":
        (folder / "0.npz").write_bytes(b"PK no zip")
    elif name == "shape":
        np.save(folder / "0.npy", good[..., :8])
    elif name == "dtype":
        np.save(folder / "0.npy", good.astype(np.float64))
    elif name == "names":
        np.savez(folder / "0.npz", z=good, label=good)
    return folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "holds no samples.*npy"),
        ("other files", "holds no samples"),
        ("truncated", "0.npy is not an .npy file"),
        ("text", "0.npy is not an .npy file"),
        ("pickle", "0.npy is not an .npy file"),
        ("broken npz", "0.npz is not an .npz file"),
        ("shape", r"'x' is float32 \[4, 3, 16, 8\]; the model expects x: float32 \[n, 3, 16, 16\]"),
        ("dtype", r"'x' is float64 \[4, 3, 16, 16\]; the model expects x: float32"),
        ("names", r"0.npz holds label, z; the model expects x: float32"),
    ],
)
def test_bad_folders_say_what_came_and_what_was_expected(name: str, message: str, tmp_path: Path) -> None:
    folder = bad_folder(tmp_path, name)
    with pytest.raises(CalibrationError, match=message):
        ModelQuantizer(QConfig.get_default_config("A8W8")).quantize_model(
            cnn(), tmp_path / "out.onnx", calibration_data_path=str(folder)
        )
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.slow
def test_bad_paths_and_bad_readers(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("0")
    for path, message in (
        (tmp_path / "absent", "neither a folder nor a file"),
        (tmp_path / ("x" * 400), "neither a folder nor a file"),
        (tmp_path / "data.txt", "no data file"),
    ):
        with pytest.raises(CalibrationError, match=message):
            PathDataReader(cnn(), path)
    np.save(tmp_path / "a.npy", rows(1)["a"])
    with pytest.raises(CalibrationError, match="one array; the model has the inputs a, index"):
        PathDataReader(two_inputs(), tmp_path)
    quantizer = ModelQuantizer(QConfig.get_default_config("A8W8"))
    with pytest.raises(ConfigError, match="not both"):
        quantizer.quantize_model(cnn(), None, Reader(images()), str(tmp_path))
    for data, message in (
        (5, "int is neither"),
        ({}, "dict is neither"),
        ({"y": images()[0]["x"]}, r"gives \['y'\]"),
        ("folder", "str is neither"),
        ([{"x": "text"}], r"'x' is <U4"),
        ([[1, [2, 3]]], "cannot be turned into numpy"),
        ([images()[0]["x"][0]], r"'x' is float32 \[3, 16, 16\]"),
        ([], "yields nothing"),
    ):
        with pytest.raises(CalibrationError, match=message):
            quantizer.quantize_model(cnn(), None, data)
    with pytest.raises(CalibrationError, match="a ndarray; expected: a dict of a: float32"):
        quantize(load(two_inputs()), A8W8, [rows(1)["a"]])


def test_inputs_of_a_file_a_proto_and_a_graph_are_the_same(tmp_path: Path) -> None:
    onnx.save(two_inputs(), tmp_path / "m.onnx")
    expected = {"a": "a: float32 [n, 3]", "index": "index: int64 [n, 2]"}
    for model in (tmp_path / "m.onnx", two_inputs(), load(two_inputs())):
        assert {name: str(entry) for name, entry in model_inputs(model).items()} == expected


def test_the_readers_are_readers_to_onnxruntime_too() -> None:
    from onnxruntime.quantization.calibrate import CalibrationDataReader as TheirReader

    assert isinstance(RandomDataReader(mlp()), TheirReader) and isinstance(
        RandomDataReader(mlp()), CalibrationDataReader
    )
    assert len(list(CachedDataReader(vectors()))) == 4
