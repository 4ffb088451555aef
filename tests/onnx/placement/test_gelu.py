"""GELU as exporters spell it out: recognised in every grouping, and kept in float where a runtime gains nothing."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest

from quark.core.metrics import sqnr
from quark.onnx.config.config import QConfig, QLayerConfig
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.tensor_specs import Int8Spec, UInt8Spec
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.passes.fuse_gelu import gelus
from quark.onnx.search.settle import quantize
from tests.models.onnx_zoo import Builder, Reader, run

FORMS = ("erf", "pow", "product", "chain")


def gelu(form: str) -> onnx.ModelProto:
    """Of opset 17, which has no Gelu, between two convolutions."""
    b = Builder()

    def number(value: float) -> str:
        return b.constant(f"c{len(b.initializers)}", np.array(value, np.float32))

    h = b.conv("x", "h", (16, 16, 1), norm=False)
    if form == "erf":
        inner = b.node("Erf", [b.node("Div", [h, number(math.sqrt(2))], "scaled")], "curve")
    else:
        if form == "chain":
            first = b.node("Mul", [number(0.044715), h], "first")
            cube = b.node("Mul", [h, b.node("Mul", [h, first], "second")], "third")
        else:
            power = ("Pow", [h, number(3.0)]) if form == "pow" else ("Mul", [b.node("Mul", [h, h], "square"), h])
            cube = b.node("Mul", [b.node(*power, "cube"), number(0.044715)], "third")
        total = b.node("Mul", [number(math.sqrt(2 / math.pi)), b.node("Add", [h, cube], "sum")], "scaled")
        inner = b.node("Tanh", [total], "curve")
    half = b.node("Mul", [number(0.5), b.node("Add", [number(1.0), inner], "one")], "half")
    b.conv(b.node("Mul", [h, half], "g"), "y", (16, 16, 1), norm=False)
    return b.model({"x": ["n", 16, 3, 3]}, {"y_conv": ["n", 16, 3, 3]})


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_quantized_inside_a_gelu(form: str) -> None:
    model = gelu(form)
    feeds = [{"x": np.random.default_rng(seed).normal(0, 2, (2, 16, 3, 3)).astype(np.float32)} for seed in range(4)]
    assert [kind for _, kind, _ in gelus(load(model).graph)] == ["none" if form == "erf" else "tanh"]
    config = QConfig(QLayerConfig(input_tensors=UInt8Spec(), weight=Int8Spec()), Target="ort_x64")
    done = to_proto(quantize(load(model), lower(config), Reader(feeds)))
    coded = {node.input[0] for node in done.graph.node if node.op_type == "QuantizeLinear"}
    assert {"x", "g"} <= coded
    assert not coded & {
        value.name for _, _, found in gelus(load(model).graph) for node in found.nodes[1:] for value in node.outputs
    }
    assert sqnr(run(model, feeds[0]), run(done, feeds[0])) > 25
