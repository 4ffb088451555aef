"""SaveAndRestore: a JSON file of ranges that is written, edited and used instead of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark.errors import CalibrationError, FormatError, OutputExistsError
from quark.onnx import CalibMethod, ModelQuantizer, QConfig, QLayerConfig, ScaleType, UInt8Spec, XInt8Spec
from quark.onnx.calibration.statistics import read_ranges, write_ranges
from tests.models.onnx_zoo import Reader, cnn, images, stored

METHODS = [(method, ScaleType.Float32) for method in CalibMethod]
METHODS += [(CalibMethod.MinMax, ScaleType.PowerOf2), (CalibMethod.MinMSE, ScaleType.PowerOf2)]


def quantized(
    file: Path, data: Any, method: tuple[CalibMethod, ScaleType] = METHODS[0], **options: Any
) -> dict[str, Any]:
    """Name of a scale or zero point -> its values."""
    kind = UInt8Spec if method[1] is ScaleType.Float32 else XInt8Spec
    spec = kind(calibration_method=method[0], scale_type=method[1])
    config = QConfig(QLayerConfig(spec, weight=XInt8Spec()), extra_options={"SaveAndRestore": str(file), **options})
    model = ModelQuantizer(config).quantize_model(cnn(), None, data)
    assert isinstance(model, onnx.ModelProto)
    return {name: array for name, array in stored(model).items() if name.endswith(("_scale", "_point"))}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_ranges_are_restored_without_data_bit_for_bit(method: tuple[CalibMethod, ScaleType], tmp_path: Path) -> None:
    file = tmp_path / "ranges.json"
    first = quantized(file, Reader(images()), method)
    assert first and set(json.loads(file.read_text())) == {"quark_version", "tensors_range"}
    again = quantized(file, None, method)
    assert {name: array.tolist() for name, array in first.items()} == {name: a.tolist() for name, a in again.items()}


def test_an_edited_range_is_the_one_that_is_used(tmp_path: Path) -> None:
    """Both forms of a range; what the file lacks is calibrated, and the file stays as it is."""
    file = tmp_path / "ranges.json"
    first = quantized(file, Reader(images()))
    content = json.loads(file.read_text())
    low, high = content["tensors_range"]["x"]
    assert float(first["x_scale"]) == pytest.approx((high[0] - low[0]) / 255, rel=1e-6)
    content["tensors_range"]["x"] = [0, 51]
    content["tensors_range"]["y"] = [[-25.5], [25.5]]
    del content["tensors_range"]["stem"]
    file.write_text(json.dumps(content))
    edited = quantized(file, Reader(images()))
    assert (float(edited["x_scale"]), int(edited["x_zero_point"])) == (np.float32(0.2), 0)
    assert (float(edited["y_scale"]), int(edited["y_zero_point"])) == (np.float32(0.2), 128)
    assert edited["stem_scale"] == first["stem_scale"]
    assert json.loads(file.read_text()) == content
    with pytest.raises(CalibrationError, match="stem"):
        quantized(file, None)


def test_the_older_name_and_the_file_of_the_documented_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ranges.json"
    first = quantized(file, Reader(images()))
    content = json.loads(file.read_text()) | {"model_to_finetune": "m.onnx", "layers_to_finetune": [2]}
    file.write_text(json.dumps(content))
    config = QConfig(QLayerConfig(UInt8Spec(calibration_method=CalibMethod.MinMax), weight=XInt8Spec()))
    config.extra_options["TensorsRangeFile"] = str(file)
    model = ModelQuantizer(config).quantize_model(cnn(), None, None)
    assert model is not None
    scales = {name: array.tolist() for name, array in stored(model).items() if name.endswith("_scale")}
    assert scales == {name: array.tolist() for name, array in first.items() if name.endswith("_scale")}
    assert "fine-tuning, if any, begins with the float weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON file"),
        ("[]", "holds no 'tensors_range'"),
        ('{"tensors_range": {"a": [1]}}', r"a: expected \[low, high\]"),
        ('{"tensors_range": {"a": ["0", "1"]}}', r"a: expected \[low, high\]"),
        ('{"tensors_range": {"a": [[0, 1], [2]]}}', r"a: expected \[low, high\]"),
        ('{"tensors_range": {"a": [true, 2]}}', r"a: expected \[low, high\]"),
        ('{"tensors_range": {"a": [2, 1]}}', "no range of float32"),
        ('{"tensors_range": {"a": [0, NaN]}}', "has the value NaN"),
        ('{"tensors_range": {"a": [0, 1e39]}}', "no range of float32"),
    ],
)
def test_files_that_are_wrong_are_refused(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "ranges.json"
    file.write_text(text)
    with pytest.raises(FormatError, match=says):
        read_ranges(file)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    ranges = {"a": (float(np.float32(-0.1)), float(np.float32(1e-38))), "b": (0.0, 0.0)}
    write_ranges(tmp_path / "r.json", ranges)
    assert read_ranges(tmp_path / "r.json") == ranges
    with pytest.raises(OutputExistsError):
        quantized(tmp_path / "r.json", None, Statistics=str(tmp_path / "r.json"))
