"""The price of an NPU's layout on a CPU is named where ONNX Runtime really fuses nothing, and there only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from quark.onnx import Int8Spec, ModelQuantizer, QConfig, QLayerConfig, UInt8Spec
from quark.onnx.config.tensor_specs import Int16Spec
from quark.onnx.evaluation.ort_fusion import inspect_fusion
from tests.models.onnx_zoo import Builder, images


def relus() -> onnx.ModelProto:
    """Two convolutions, each with its Relu."""
    b = Builder()
    h = b.node("Relu", [b.conv("x", "first", (3, 8, 3))], "one")
    b.node("Relu", [b.conv(h, "second", (8, 8, 3))], "two")
    return b.model({"x": ["n", 3, 16, 16]}, {"two": ["n", 8, 16, 16]})


@pytest.mark.parametrize(
    ("activation", "options", "said"),
    [
        (Int8Spec(), {}, "2 Relu stay after their layers under symmetric int8"),
        (Int16Spec(), {}, "no integer kernels for int16"),
        (UInt8Spec(), {"FoldRelu": True}, None),
        (Int8Spec(), {"Target": "npu"}, None),
    ],
)
def test_the_price_is_that_of_onnx_runtime(
    activation: Any, options: dict[str, Any], said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = QConfig(QLayerConfig(input_tensors=activation, weight=Int8Spec()), **options)
    with caplog.at_level("INFO"):
        ModelQuantizer(config).quantize_model(relus(), tmp_path / "done.onnx", images())
    lines = [record.getMessage() for record in caplog.records if "layout for NPUs" in record.getMessage()]
    assert len(lines) == (said is not None) and all(said in line for line in lines if said)
    if "Target" not in options:
        fused = all(row.integer for row in inspect_fusion(tmp_path / "done.onnx") if row.op_type == "Conv")
        assert fused is (said is None)
