"""What ONNX Runtime makes integer of excluded layers is named: compared with the graph that it runs."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest

from quark.onnx import ModelQuantizer, QuantizationConfig, QuantType
from quark.onnx.config.config import Config
from tests.models.onnx_zoo import Builder, images


def three() -> onnx.ModelProto:
    """Three convolutions, a Relu behind the second."""
    b = Builder()
    h = b.conv("x", "first", (3, 8, 3))
    h = b.node("Relu", [b.conv(h, "second", (8, 8, 3))], "relu")
    return b.model({"x": ["n", 3, 16, 16]}, {b.conv(h, "third", (8, 8, 3)): ["n", 8, 16, 16]})


@pytest.mark.slow
@pytest.mark.parametrize(
    "excluded",
    [
        ["second_conv_node", "relu_node"],
        ["first_conv_node"],
        ["third_conv_node"],
        ["second_conv_node", "relu_node", "third_conv_node"],
        [],
    ],
)
def test_what_is_named_is_what_the_runtime_makes_integer(
    excluded: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = three()
    config = QuantizationConfig(
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        nodes_to_exclude=excluded,
        extra_options={"Target": "ort_x64"},
    )
    with caplog.at_level("INFO"):
        ModelQuantizer(Config(config)).quantize_model(model, tmp_path / "q.onnx", images())
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "run.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(tmp_path / "q.onnx", options)
    run = onnx.load(tmp_path / "run.onnx").graph
    integer = sum(node.op_type == "QLinearConv" for node in run.node)
    quantized = 3 - sum(name != "relu_node" for name in excluded)
    lines = [record.getMessage() for record in caplog.records if "all the same" in record.getMessage()]
    named = [line.split("computes ")[1].split(" in integers")[0].split(", ") for line in lines]
    assert integer - quantized == sum(map(len, named))
    assert {name for names in named for name in names} <= set(excluded)
    assert bool(lines) == (excluded == ["second_conv_node", "relu_node"])
