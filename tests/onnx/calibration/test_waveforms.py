"""Sounds for models that read samples of sound."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import onnx
import pytest

from quark.errors import CalibrationError
from quark.onnx import PathDataReader


def model_of(shape: list[int | str], kind: int = onnx.TensorProto.FLOAT) -> onnx.ModelProto:
    info = onnx.helper.make_tensor_value_info("x", kind, shape)
    made = onnx.helper.make_tensor_value_info("y", kind, None)
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", [info], [made])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    """A folder of two sounds, of 50 and 30 samples, and one file that is none."""
    folder = tmp_path / "sounds"
    folder.mkdir()
    for index, size in enumerate((50, 30)):
        write(folder / f"{index}.wav", np.arange(size, dtype=np.int16) * 300 - 2000)
    (folder / "a.mp3").write_bytes(b"ID3")
    return folder


def write(file: Path, samples: np.ndarray, rate: int = 16000) -> None:
    with wave.open(str(file), "wb") as opened:
        opened.setparams((1, 2, rate, len(samples), "NONE", ""))
        opened.writeframes(samples.astype("<i2").tobytes())


@pytest.mark.parametrize("shape", [["n", 40], ["n", 1, 40], [40], ["n", "t"]])
def test_sounds_are_samples_from_minus_1_to_1_of_the_length_of_the_input(shape: list[int | str], sounds: Path) -> None:
    first, second = (feed["x"] for feed in PathDataReader(model_of(shape), sounds))
    length = 40 if 40 in shape else 50
    assert first.shape == (*[1] * (len(shape) - 1), length) and first.dtype == np.float32
    np.testing.assert_array_equal(first.ravel()[:40], ((np.arange(50) * 300 - 2000) / 32768).astype(np.float32)[:40])
    assert 40 not in shape or not second.ravel()[30:].any()
    if shape == ["n", 40]:
        (raw, _) = (feed["x"] for feed in PathDataReader(model_of(shape, onnx.TensorProto.INT16), sounds))
        assert raw.dtype == np.int16 and raw[0, :3].tolist() == [-2000, -1700, -1400]


@pytest.mark.slow
def test_the_file_beside_the_model_says_the_rate_and_whether_sounds_are_normalized(
    sounds: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=16000, do_normalize=True)
    extractor.save_pretrained(tmp_path)
    onnx.save(model_of(["n", "t"]), tmp_path / "m.onnx")
    samples = ((np.arange(50) * 300 - 2000) / 32768).astype(np.float32)
    expected = extractor(samples, sampling_rate=16000, return_tensors="np")["input_values"]
    first = next(iter(PathDataReader(tmp_path / "m.onnx", sounds)))["x"]
    np.testing.assert_allclose(first, expected, atol=1e-6)
    config = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**config, "sampling_rate": 8000}))
    with pytest.raises(CalibrationError, match="has 16000 samples a second, and the model reads 8000"):
        list(PathDataReader(tmp_path / "m.onnx", sounds))


def test_rates_that_differ_and_inputs_that_are_no_sound_are_refused(sounds: Path) -> None:
    with pytest.raises(CalibrationError, match="reads no samples of sound"):
        list(PathDataReader(model_of(["n", 80, 3000]), sounds))
    write(sounds / "2.wav", np.arange(9, dtype=np.int16), 8000)
    with pytest.raises(CalibrationError, match=r"8000 samples a second, and the model reads 16000 \(by the first"):
        list(PathDataReader(model_of(["n", 40]), sounds))
