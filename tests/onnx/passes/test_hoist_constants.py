"""Constants that a Loop or Scan hands from step to step: the body reads them, and its weights get codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.core.metrics import sqnr
from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.passes.hoist_constants import hoist_constants
from tests.models.onnx_zoo import Builder, run

SIZE = 64


def info(name: str, *shape: Any, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def body(kind: str, state: str) -> onnx.GraphProto:
    """h' = tanh(h @ w), w' as `state` says."""
    nodes = [
        helper.make_node("MatMul", ["h", "w"], ["product"], name="inner"),
        helper.make_node("Tanh", ["product"], ["h_next"], name="tanh"),
    ]
    given = {"kept": "w", "identity": "w_next", "changed": "w_next"}[state]
    if given != "w":
        change = ["Identity", ["w"]] if state == "identity" else ["Mul", ["w", "half"]]
        nodes.append(helper.make_node(*change, ["w_next"], name="next"))
    half = [numpy_helper.from_array(np.array(0.5, np.float32), "half")]
    states, outputs = [info("h", 1, SIZE), info("w", SIZE, SIZE)], [info("h_next", 1, SIZE), info(given, SIZE, SIZE)]
    if kind == "Scan":
        nodes.append(helper.make_node("Add", ["h_next", "row"], ["out"], name="add"))
        return helper.make_graph(nodes, "body", [*states, info("row", SIZE)], [*outputs, info("out", 1, SIZE)], half)
    nodes.append(helper.make_node("Identity", ["go"], ["going"], name="go"))
    control = [info("step", kind=TensorProto.INT64), info("go", kind=TensorProto.BOOL)]
    return helper.make_graph(nodes, "body", [*control, *states], [info("going", kind=TensorProto.BOOL), *outputs], half)


def model(kind: str = "Loop", state: str = "kept", reader: bool = False) -> onnx.ModelProto:
    """A layer, and four steps with its weight; with `reader` something reads the weight that comes out."""
    b = Builder()
    weight = b.constant("weight", b.random.normal(0, 0.12, (SIZE, SIZE)))
    first = b.node("MatMul", ["x", weight], "first")
    inner = body(kind, state)
    if kind == "Loop":
        b.integers("steps", 4)
        b.initializers.append(numpy_helper.from_array(np.array(True), "true"))
        b.nodes.append(
            helper.make_node("Loop", ["steps", "true", first, weight], ["h_last", "w_last"], name="loop", body=inner)
        )
    else:
        rows = b.constant("rows", b.random.normal(0, 1, (4, SIZE)))
        b.nodes.append(
            helper.make_node(
                "Scan", [first, weight, rows], ["h_last", "w_last", "outs"], name="loop", body=inner, num_scan_inputs=1
            )
        )
    y = "h_last" if kind == "Loop" else b.node("Add", ["h_last", b.node("ReduceSum", ["outs"], "all")], "both")
    b.node("MatMul", [y, "w_last"], "y") if reader else b.node("Neg", [y], "y")
    return b.model({"x": [1, SIZE]}, {"y": [1, SIZE]})


def hiding(hidden: str) -> onnx.ModelProto:
    """An input of the body has the name of the constant around it."""
    made = model()
    (loop,) = (node for node in made.graph.node if node.op_type == "Loop")
    graph = loop.attribute[0].g
    for value in (*graph.input, *graph.output):
        value.name = "weight" if value.name == hidden else value.name
    for node in graph.node:
        node.input[:] = ["weight" if name == hidden else name for name in node.input]
    return made


FEED = {"x": np.random.default_rng(3).normal(size=(1, SIZE)).astype(np.float32)}


# A Scan whose body gives an input as it is, is computed wrongly by ONNX Runtime 1.31 (other figures in each run).
@pytest.mark.parametrize(("kind", "state"), [("Loop", "kept"), ("Loop", "identity"), ("Scan", "identity")])
@pytest.mark.parametrize("reader", [False, True])
def test_the_outputs_stay_and_the_state_is_gone(kind: str, state: str, reader: bool) -> None:
    source = model(kind, state, reader=reader)
    loaded = load(source)
    assert hoist_constants(loaded) == 1 and hoist_constants(loaded) == 0
    done = to_proto(loaded)
    onnx.checker.check_model(done)
    (loop,) = (node for node in done.graph.node if node.op_type == kind)
    assert "weight" not in loop.input and len(loop.output) == (1 if kind == "Loop" else 2)
    # The runtime's kernel for a constant matrix adds up in another order.
    np.testing.assert_allclose(run(done, FEED), run(source, FEED), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["Loop", "Scan"])
def test_what_changes_stays(kind: str) -> None:
    assert hoist_constants(load(model(kind, "changed"))) == 0


@pytest.mark.parametrize(("hidden", "count"), [("w", 1), ("h", 0)])
def test_no_other_tensor_of_its_name_is_read(hidden: str, count: int) -> None:
    source = hiding(hidden)
    loaded = load(source)
    assert hoist_constants(loaded) == count
    np.testing.assert_allclose(run(to_proto(loaded), FEED), run(source, FEED), rtol=0, atol=1e-5)


def test_an_output_of_the_model_keeps_its_name() -> None:
    source = model()
    source.graph.output.append(info("w_last", SIZE, SIZE))
    assert hoist_constants(load(source)) == 0


@pytest.mark.parametrize("kind", ["Loop", "Scan"])
@pytest.mark.parametrize("preset", ["INT8_CPU_WEIGHTS", "INT8_CPU_DYNAMIC", "UINT8_DYNAMIC_QUANT"])
def test_the_weight_is_written_once_as_codes(kind: str, preset: str) -> None:
    source = model(kind, "identity")
    done = ModelQuantizer(Config(get_default_config(preset))).quantize_model(source)
    assert done is not None
    assert done.ByteSize() < 0.5 * source.ByteSize()
    assert sqnr(run(source, FEED), run(done, FEED)) > 30
