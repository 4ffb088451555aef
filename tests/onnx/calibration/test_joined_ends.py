"""Boxes and scores that a model ends in keep a scale each, by every preset that gives the joined tensor one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from quark.onnx import ModelQuantizer
from quark.onnx.evaluation.compare_models import compare_models
from quark.onnx.graph.model_file import load
from quark.onnx.graph.output_parts import output_parts
from tests.models.onnx_zoo import Array, Builder, run


def detector(ratio: float, end: str = "Concat") -> onnx.ModelProto:
    """Boxes up to about `ratio` and scores from 0 to 1, (n, 4 and 3, 36), joined; `end`: what is made of the whole."""
    b = Builder()
    features = b.node("Relu", [b.conv("x", "stem", (3, 16, 3), norm=False)], "features")
    flat = b.integers("flat", [0, 0, -1])
    boxes = b.node("Sigmoid", [b.conv(features, "near", (16, 4, 1), norm=False)], "near")
    boxes = b.node("Mul", [boxes, b.constant("stride", np.array(ratio))], "boxes")
    scores = b.node("Sigmoid", [b.conv(features, "far", (16, 3, 1), norm=False)], "scores")
    parts = [b.node("Reshape", [x, flat], f"{x}_flat") for x in (boxes, scores)]
    joined = b.node("Concat", parts, "y" if end == "Concat" else "joined", axis=1)
    if end == "Slice":
        joined = b.node("Transpose", [joined], "turned", perm=[0, 2, 1])
        bounds = [b.integers(name, [value]) for name, value in (("start", 4), ("stop", 7), ("axis", 2))]
        b.node("Add", [b.node("Slice", [joined, *bounds], "taken"), b.constant("half", np.array(0.5))], "y")
    elif end == "Conv":
        b.node("Conv", [joined, b.constant("mix", b.random.normal(size=(2, 7, 1)))], "y")
    return b.model({"x": ["n", 3, 6, 6]}, {"y": [None, None, None]})


def feeds() -> list[dict[str, Array]]:
    random = np.random.default_rng(0)
    return [{"x": random.normal(size=(2, 3, 6, 6)).astype(np.float32)} for _ in range(6)]


def sqnrs(model: onnx.ModelProto, quantized: onnx.ModelProto) -> list[float]:
    found = []
    for part in output_parts(load(model))["y"]:
        x, y = (np.stack([part.of(run(each, feed)) for feed in feeds()]).astype(float) for each in (model, quantized))
        found.append(float(10 * np.log10((x**2).sum() / ((x - y) ** 2).sum())))
    return found


def quantized(model: onnx.ModelProto, preset: str) -> tuple[onnx.ModelProto, set[str]]:
    """And the tensors that have codes."""
    made = ModelQuantizer(preset).quantize_model(model, None, feeds())
    assert made is not None
    return made, {
        node.name.removesuffix("_QuantizeLinear") for node in made.graph.node if node.op_type == "QuantizeLinear"
    }


@pytest.mark.parametrize("preset", ["INT8_CPU", "A8W8", "XINT8", pytest.param("S8S8_AAWS", marks=pytest.mark.slow)])
def test_each_part_of_a_joined_end_keeps_its_values(preset: str) -> None:
    model = detector(300)
    made, coded = quantized(model, preset)
    assert min(sqnrs(model, made)) > 20
    assert "y" not in coded


@pytest.mark.parametrize("preset", ["A8W8", pytest.param("XINT8", marks=pytest.mark.slow)])
def test_a_slice_behind_takes_its_part_as_it_was(preset: str) -> None:
    model = detector(300, "Slice")
    made, coded = quantized(model, preset)
    assert min(sqnrs(model, made)) > 20
    assert not {"joined", "turned"} & coded and "taken" in coded


def test_what_has_one_range_or_is_computed_with_keeps_its_codes() -> None:
    assert "y" in quantized(detector(2), "A8W8")[1]
    assert "joined" in quantized(detector(300, "Conv"), "A8W8")[1]


def test_a_part_has_a_row_of_its_own_in_a_comparison(tmp_path: Path) -> None:
    model = detector(300)
    onnx.save(model, tmp_path / "float.onnx")
    ModelQuantizer("A8W8").quantize_model(model, tmp_path / "int8.onnx", feeds())
    found = compare_models(tmp_path / "float.onnx", tmp_path / "int8.onnx", feeds())
    assert list(found.outputs) == ["y[:, :4]", "y[:, 4:]"]
    expected = sqnrs(model, onnx.load(tmp_path / "int8.onnx"))
    assert [each.sqnr for each in found.outputs.values()] == pytest.approx(expected, abs=0.01)
