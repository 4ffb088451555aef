"""Where this processor's integer kernels saturate, the file is measured all the same, and the log says so.

Both answers of the probe are pretended, so that each processor runs both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark.core.metrics import sqnr
from quark.onnx import Int8Spec, ModelQuantizer, QConfig, QLayerConfig, UInt8Spec
from quark.onnx.evaluation.compare_models import compare_models
from quark.onnx.graph import sessions
from tests.models.onnx_zoo import Builder, run

ASKING = (
    "quark.onnx.calibration.calibrate",
    "quark.onnx.evaluation.compare_models",
    "quark.onnx.evaluation.cpu_price",
    "quark.onnx.search.lost_outputs.damage",
)
WIDTH = 32


def largest_codes() -> onnx.ModelProto:
    """Two matrices of nothing but their largest value, whose products with inputs near theirs saturate in 16 bits."""
    b = Builder()
    hidden = b.node("MatMul", ["x", b.constant("w", np.ones((WIDTH, WIDTH)))], "h")
    b.node("MatMul", [hidden, b.constant("v", np.ones((WIDTH, WIDTH)))], "y")
    return b.model({"x": ["n", WIDTH]}, {"y": ["n", WIDTH]})


def feeds() -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    return [{"x": random.uniform(0.5, 1, (8, WIDTH)).astype(np.float32)} for _ in range(4)]


def config(weight: Any, **options: Any) -> QConfig:
    return QConfig(QLayerConfig(input_tensors=UInt8Spec(), weight=weight), **options)


@pytest.fixture(params=[True, False], ids=["exact", "saturating"])
def exact(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    for module in ASKING:
        monkeypatch.setattr(f"{module}.integer_kernels_are_exact", lambda: request.param)
    return bool(request.param)


def notes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "VNNI" in record.getMessage()]


def test_the_line_names_the_layers_where_kernels_saturate(exact: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for target in ("ort_x64", "npu"):
        ModelQuantizer(config(Int8Spec(), Target=target)).quantize_model(largest_codes(), None, feeds())
    ModelQuantizer(config(UInt8Spec(), Target="ort_x64")).quantize_model(largest_codes(), None, feeds())
    found = notes(caplog)
    assert len(found) == (not exact) and all("in 2 layers" in line for line in found)


def test_a_comparison_says_it_of_a_file(exact: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    onnx.save(largest_codes(), tmp_path / "float.onnx")
    ModelQuantizer(config(Int8Spec(), Target="npu")).quantize_model(
        tmp_path / "float.onnx", tmp_path / "int8.onnx", feeds()
    )
    caplog.set_level("INFO")
    compare_models(tmp_path / "float.onnx", tmp_path / "int8.onnx", feeds())
    assert len(notes(caplog)) == (not exact)


def test_what_is_lost_is_what_the_file_loses_on_every_processor() -> None:
    """Without VNNI the kernels lose nearly all of these sums."""
    quantizer = ModelQuantizer(config(Int8Spec()))
    written = quantizer.quantize_model(largest_codes(), None, feeds())
    assert written is not None and quantizer.damage is not None
    expected, found = (
        np.concatenate([run(each, feed, optimise=False) for feed in feeds()]) for each in (largest_codes(), written)
    )
    assert quantizer.damage.sqnr == pytest.approx(sqnr(expected, found), abs=0.5) and quantizer.damage.sqnr > 25


def test_recovery_scores_what_the_file_says() -> None:
    found = ModelQuantizer(config(Int8Spec(), Target="ort_x64")).recover(
        largest_codes(), None, feeds(), budget=10, quick=True
    )
    assert found.score > 25


def test_the_probe_is_what_a_session_computes() -> None:
    """The largest codes of both types, summed by the default kernels."""
    x, w = np.full((1, 64), 255, np.uint8), np.full((64, 64), 127, np.int8)
    kind = onnx.TensorProto
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", kind.UINT8, [1, 64])],
        [onnx.helper.make_tensor_value_info("y", kind.INT32, [1, 64])],
        [onnx.numpy_helper.from_array(w, "w")],
    )
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    (y,) = sessions.open_session(proto).run(None, {"x": x})
    assert bool((y == x.astype(np.int64) @ w).all()) is sessions.integer_kernels_are_exact()
