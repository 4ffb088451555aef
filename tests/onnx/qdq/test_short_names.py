"""Small models of long names do not grow by the names of what is added; what is computed, and compared, is the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from quark.onnx import ModelQuantizer
from quark.onnx.evaluation.compare_models import compare_models
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.qdq.short_names import MOST_LARGER, shorten_names
from tests.models.onnx_zoo import Builder, cnn, images, run


def of_long_names(depth: int = 12) -> onnx.ModelProto:
    """As some exporters write them: each tensor has the path of all that came before it."""
    b, x = Builder(), "x"
    for layer in range(depth):
        name = f"{'the/path/of/a/model;' * 8}layer_{layer}"
        x = b.node("Relu", [b.conv(x, name, (4, 4, 1), norm=False)], f"{name}_relu")
    b.node("Identity", [x], "y")
    return b.model({"x": ["n", 4, 5, 5]}, {"y": ["n", 4, 5, 5]})


def feeds() -> list[dict[str, np.ndarray]]:
    return [{"x": np.random.default_rng(seed).normal(size=(1, 4, 5, 5)).astype(np.float32)} for seed in range(3)]


@pytest.mark.parametrize("preset", ["BF16", "A8W8", pytest.param("XINT8", marks=pytest.mark.slow)])
def test_a_small_model_of_long_names_stays_small(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_long_names()
    onnx.save(model, tmp_path / "float.onnx")
    ModelQuantizer(preset).quantize_model(model, tmp_path / "out.onnx", feeds())
    made = onnx.load(tmp_path / "out.onnx")
    assert made.ByteSize() < MOST_LARGER * model.ByteSize()
    assert max(len(node.name) for node in made.graph.node if "Dequantize" in node.op_type) < 40
    # The same tensors are compared, with the same figures, as under the documented names.
    monkeypatch.setattr("quark.onnx.qdq.short_names.shorten_where_larger", lambda *_: None)
    ModelQuantizer(preset).quantize_model(model, tmp_path / "long.onnx", feeds())
    reports = [compare_models(tmp_path / "float.onnx", tmp_path / name, feeds()) for name in ("out.onnx", "long.onnx")]
    short, long = ({layer.tensor: layer.sqnr for layer in report.layers} for report in reports)
    assert short == pytest.approx(long) and len(short) > 12


def test_other_names_are_as_documented_and_shortening_changes_no_value() -> None:
    made = ModelQuantizer("A8W8").quantize_model(cnn(), None, images())
    assert made is not None and "stem_DequantizeLinear" in {node.name for node in made.graph.node}

    copied = onnx.ModelProto()
    copied.CopyFrom(made)
    short = ir.from_proto(copied)
    assert shorten_names(short) > 3
    short_proto = to_proto(short)
    onnx.checker.check_model(short_proto)
    np.testing.assert_array_equal(run(made, images()[0]), run(short_proto, images()[0]))
    kept = {name for node in load(cnn()).graph for name in (node.name, *(v.name for v in node.outputs))}
    there = {name for node in short_proto.graph.node for name in (node.name, *node.output)}
    assert kept & {name for node in made.graph.node for name in (node.name, *node.output)} <= there
