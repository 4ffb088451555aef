"""The times of a file, by a clock of the test's own."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from quark.commands.onnx_files.file_times import file_times
from quark.errors import CalibrationError
from quark.onnx import ModelQuantizer
from tests.onnx.search.latency.test_measure import FEED, Clock, config, model_of_convolutions


def test_sizes_that_are_left_open_are_asked_for(tmp_path: Path) -> None:
    """Noise of height and width 1 would be timed, and show a faster file as slower."""
    model = model_of_convolutions()
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    onnx.save(model, tmp_path / "open.onnx")
    with pytest.raises(CalibrationError, match=r"open.onnx takes \w+: float32 \[.*height.*\]: .*--data"):
        file_times(tmp_path / "open.onnx")


@pytest.mark.slow
def test_each_convolution_has_its_time_in_float_and_in_the_file(tmp_path: Path) -> None:
    ModelQuantizer(config(MeasurePlacement=False)).quantize_model(model_of_convolutions(), tmp_path / "q.onnx", [FEED])

    def seconds(signature: str) -> float:
        if "QLinearConv" in signature:
            return 7e-4 if "group=16" in signature else 1e-4
        return 5e-4 if "Conv" in signature else 0.0

    found = file_times(tmp_path / "q.onnx", timer=Clock(seconds))
    assert found.nodes[0].nodes[0] == "second"
    assert {row.nodes[0]: (row.float_seconds, row.file_seconds) for row in found.nodes} == {
        "first": (5e-4, 1e-4),
        "second": (5e-4, 7e-4),
        "third": (5e-4, 1e-4),
    }
    assert found.float_seconds == pytest.approx(15e-4) and found.file_seconds == pytest.approx(9e-4)
    assert found.conversions == 0.0 and found.by_node["second"] == 7e-4
