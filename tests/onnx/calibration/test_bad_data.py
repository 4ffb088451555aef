"""Calibration data and statistics that are wrong, hostile or useless: one clear error, never a model without a word."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from quark.core.granularity import PerGroup
from quark.core.spec import LayerSpec, TensorSpec, spec
from quark.errors import CalibrationError, FormatError, NonFiniteError, NotSupportedError
from quark.onnx import CachedDataReader, ModelQuantizer, PathDataReader
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.sample_files import read_image
from quark.onnx.calibration.statistics import Statistics, fingerprint
from quark.onnx.config.settings import CalibrationSettings, QDQSettings, Settings, SpecSettings
from quark.onnx.graph.model_file import load
from quark.onnx.search.settle import quantize
from tests.models import onnx_odd as odd
from tests.models.onnx_zoo import Builder, mlp, vectors

U8 = spec("uint8", symmetric=False)
ROWS = [{"x": np.arange(1, 17, dtype=np.float32).reshape(2, 8)}]


def settings(observer: str = "min_max", **calibration: Any) -> Settings:
    layer = LayerSpec(weight=spec("int8"), input=replace(U8, observer=observer))
    return Settings(SpecSettings(layer), qdq=QDQSettings(), calibration=CalibrationSettings(**calibration))


# Readers. -------------------------------------------------------------------------------------------------------------


def raising() -> Iterator[Any]:
    yield {"x": np.ones((1, 8), np.float32)}
    raise KeyError("lost")


class Stops:
    def get_next(self) -> Any:
        return next(iter([]))


class Ragged:
    def get_next(self) -> Any:
        return {"x": [[1.0], [1.0, 2.0]]}


class FailsAtOnce:
    def __iter__(self) -> Iterator[Any]:
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (raising, "fails after 1 samples: KeyError: 'lost'"),
        (Stops, "fails after 0 samples: StopIteration.*return None at the end"),
        (Ragged, "fails after 0 samples: ValueError"),
        (FailsAtOnce, "fails after 0 samples: OSError: the disk is gone"),
    ],
)
def test_what_a_reader_raises_is_a_calibration_error(reader: Any, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        quantize(load(odd.linear()), settings(), reader())
    with pytest.raises(CalibrationError, match="fails after"):
        CachedDataReader(Stops())


# Values. --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observer", ["min_max", "entropy", "percentile", "mse"])
@pytest.mark.parametrize("value", [0, 1e-42])
def test_data_that_are_all_zero_say_nothing(value: float, observer: str) -> None:
    feeds = [{"x": np.full((2, 8), value, np.float32)}] * 2
    with pytest.raises(CalibrationError, match="Every calibration sample is zero, or below"):
        quantize(load(odd.linear()), settings(observer), feeds)
    alive = [*feeds, {"x": np.ones((2, 8), np.float32)}]
    quantize(load(odd.linear()), settings(observer), alive)


def test_token_zero_is_a_token() -> None:
    feeds = [{"ids": np.zeros((1, 5), np.int64)}]
    quantize(load(odd.embedding_and_head()), settings(), feeds)


def test_nan_is_named_though_the_first_operator_hides_it() -> None:
    b = Builder()
    b.node("MatMul", [b.node("Relu", ["x"], "r"), b.constant("w", np.ones((8, 4)))], "y")
    x = np.ones((2, 8), np.float32)
    x[1, 1] = np.nan
    with pytest.raises(NonFiniteError, match="The input 'x' of the calibration sample 1 holds NaN"):
        quantize(load(b.model({"x": ["n", 8]}, {"y": ["n", 4]})), settings(), [{"x": np.ones_like(x)}, {"x": x}])


@pytest.mark.parametrize("observer", ["min_max", "entropy"])
@pytest.mark.parametrize(("factor", "message"), [(1e-42, "no scale divides them"), (1e-12, "would all become zero")])
def test_an_activation_that_would_vanish_is_named(factor: float, message: str, observer: str) -> None:
    b = Builder()
    small = b.node("Mul", ["x", b.constant("factor", np.array(factor))], "small")
    b.node("MatMul", [small, b.constant("w", np.ones((8, 4)))], "y")
    with pytest.raises(CalibrationError, match=f"small: .*{message}"):
        quantize(load(b.model({"x": ["n", 8]}, {"y": ["n", 4]})), settings(observer), ROWS)


def test_an_activation_of_zeros_is_exact() -> None:
    b = Builder()
    dead = b.node("MatMul", ["x", b.constant("z", np.zeros((8, 8)))], "dead")
    b.node("Add", [b.node("MatMul", [dead, b.constant("w", np.ones((8, 8)))], "h"), "x"], "y")
    quantize(load(b.model({"x": ["n", 8]}, {"y": ["n", 8]})), settings(), ROWS)


@pytest.mark.parametrize("weight", [spec("int8"), spec("mxint8", PerGroup(0, 32)), spec("bfloat16")], ids=str)
def test_a_weight_below_the_normal_float32_is_named(weight: TensorSpec) -> None:
    b = Builder()
    b.node("MatMul", ["x", b.constant("w", np.full((32, 32), 1e-41))], "y")
    model = b.model({"x": ["n", 32]}, {"y": ["n", 32]})
    config = replace(settings(), specs=SpecSettings(LayerSpec(weight=weight)))
    with pytest.raises(CalibrationError, match="weight w of y_node.*no scale divides them"):
        quantize(load(model), config, [{"x": np.ones((2, 32), np.float32)}])


# Files. ---------------------------------------------------------------------------------------------------------------


def test_pipes_are_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npz")
    with pytest.raises(CalibrationError, match="neither a folder nor a file"):
        PathDataReader(mlp(), tmp_path / "x.npz")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "x.npy")
    with pytest.raises(CalibrationError, match="is not a file"):
        PathDataReader(mlp(), tmp_path / "folder").get_next()
    with pytest.raises(FormatError, match="is not a file"):
        Statistics.load(tmp_path / "x.npz", "")


def test_arrays_that_lie_about_their_size_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 8), np.float32))
    data = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(data.replace(b"(1, 8)", b"(9**9,)"[:6]))
    with pytest.raises(CalibrationError, match=r"is not an \.npy file"):
        PathDataReader(mlp(), tmp_path).get_next()


def test_an_input_that_is_no_tensor_is_named() -> None:
    tensor = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, ["n", 8])
    kinds = {
        "a map": onnx.helper.make_map_type_proto(onnx.TensorProto.INT64, tensor),
        "a sequence": onnx.helper.make_sequence_type_proto(tensor),
        "an optional": onnx.helper.make_optional_type_proto(tensor),
    }
    for words, kind in kinds.items():
        model = odd.linear()
        model.graph.input.append(onnx.helper.make_value_info("m", kind))
        with pytest.raises(NotSupportedError, match=f"The input m is {words}, and samples hold tensors only"):
            model_inputs(model)


def test_a_model_whose_input_is_a_sequence_is_quantized_without_samples() -> None:
    model = odd.linear()
    model.graph.input.append(onnx.helper.make_tensor_sequence_value_info("s", onnx.TensorProto.FLOAT, ["n", 8]))
    made = ModelQuantizer("INT8_CPU_DYNAMIC").quantize_model(model)
    assert made is not None and "MatMulInteger" in {node.op_type for node in made.graph.node}


def test_an_archive_that_is_none_is_closed_again(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"PK\3\4 and no more")
    with pytest.raises(CalibrationError, match=r"is not an \.npz file"):
        PathDataReader(mlp(), tmp_path).get_next()


@pytest.mark.parametrize("limit", [100, 40])
def test_images_beyond_the_limit_of_pillow_are_refused(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (10, 10)).save(tmp_path / "x.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit - 1)
    with pytest.raises(FormatError, match="not an image that can be read: .*decompression bomb"):
        read_image(tmp_path / "x.png")


# Statistics. ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def arrays(tmp_path: Path) -> dict[str, Any]:
    """What a good statistics file holds; it lies at s.npz."""
    quantize(load(mlp()), settings(statistics=str(tmp_path / "s.npz")), vectors(2))
    with np.load(tmp_path / "s.npz") as file:
        return {name: file[name] for name in file.files}


def changes(arrays: dict[str, Any]) -> dict[str, Any]:
    count = len(arrays["names"])
    return {
        "other order": {"names": arrays["names"][::-1]},
        "NaN": {"low": np.full(count, np.nan)},
        "negative counts": {"counts": -arrays["counts"]},
        "another shape": {"high": arrays["high"][:-1]},
        "another length": {"ends": arrays["ends"] + 1},
        "another type": {"bins": arrays["bins"].astype(str)},
        "no digest": {"digest": None},
        "no names": {"names": None},
        "objects": {"names": np.array([print] * count, dtype=object)},
    }


@pytest.mark.slow
def test_statistics_that_were_changed_are_refused(arrays: dict[str, Any], tmp_path: Path) -> None:
    quantize(load(mlp()), settings(statistics=str(tmp_path / "s.npz")), None)
    for change in changes(arrays).values():
        kept = {key: array for key, array in (arrays | change).items() if array is not None}
        np.savez(tmp_path / "s.npz", allow_pickle=True, **kept)
        with pytest.raises(FormatError, match="was changed after|is not a statistics file"):
            quantize(load(mlp()), settings(statistics=str(tmp_path / "s.npz")), None)


def test_files_that_are_no_statistics_are_refused(arrays: dict[str, Any], tmp_path: Path) -> None:
    whole, path = (tmp_path / "s.npz").read_bytes(), tmp_path / "s.npz"
    one = io.BytesIO()
    np.save(one, arrays["low"])
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("format.npy", b"no array")
    for content in (b"", b"text", one.getvalue(), other.getvalue(), whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(FormatError, match="is not a statistics file"):
            quantize(load(mlp()), settings(statistics=str(path)), None)


def test_the_fingerprint_sees_every_value() -> None:
    model = mlp()
    seen = {fingerprint(load(model))}
    big = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
    array = onnx.numpy_helper.to_array(big).copy()
    for place in (1, array.size // 2 + 1, array.size - 1):
        array.reshape(-1)[place] += 1
        big.CopyFrom(onnx.numpy_helper.from_array(array, big.name))
        seen.add(fingerprint(load(model)))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    seen.add(fingerprint(load(model)))
    assert len(seen) == 5
