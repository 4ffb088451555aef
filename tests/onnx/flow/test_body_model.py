"""Bodies as models of their own, and back."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from quark.onnx.flow.body_model import as_model, bodies_of, captured_reads, put_back
from quark.onnx.graph.model_file import load, to_proto
from tests.models.onnx_bodies import in_branches, rows, sums
from tests.models.onnx_zoo import branches, mlp, run


@pytest.mark.parametrize("model", [branches(), sums("Loop"), sums("Scan")], ids=["If", "Loop", "Scan"])
def test_a_body_put_back_is_what_it_was(model: onnx.ModelProto) -> None:
    loaded = load(model)
    counterpart = loaded.clone()
    for body, copied in zip(bodies_of(loaded.graph), bodies_of(counterpart.graph), strict=True):
        reads = [(node.name, index) for node, index in captured_reads(body.graph)]
        changed = as_model(copied, counterpart)
        assert not list(captured_reads(changed.model.graph))
        put_back(body, copied, changed, loaded)
        assert [(node.name, index) for node, index in captured_reads(body.graph)] == reads
        assert not body.graph.initializers
    result = to_proto(loaded)
    onnx.checker.check_model(result, full_check=True)
    feed = {"x": np.ones((3, 8), np.float32)} if "chosen" in str(model.graph.node) else rows(1)[0]
    assert np.array_equal(run(result, feed), run(model, feed))


def test_captured_constants_are_initializers_and_inner_reads_are_those_of_the_body() -> None:
    loaded = load(branches())
    body = as_model(bodies_of(loaded.graph)[0], loaded)
    assert set(body.captured) == {"hidden"} and set(body.constants) == {"w"}
    nested = load(in_branches(mlp(), levels=2))
    (then,) = (body for body in bodies_of(nested.graph) if body.attribute == "then_branch")
    inner = as_model(then, nested)
    assert {"x", "yes"} == set(inner.captured) and inner.own == 0
    assert len(bodies_of(inner.model.graph)) == 2


def test_names_of_the_model_around_are_left_to_it() -> None:
    loaded, counterpart = load(branches()), load(branches())
    body, copied = bodies_of(loaded.graph)[0], bodies_of(counterpart.graph)[0]
    changed = as_model(copied, counterpart)
    for node in changed.model.graph:
        node.name = "product_node"
        node.outputs[0].name = "product" if node.op_type == "MatMul" else "x"
    put_back(body, copied, changed, loaded)
    assert [node.name for node in body.graph] == ["product_node_", "product_node__"]
    assert [node.outputs[0].name for node in body.graph] == ["product_", "x_"]
    onnx.checker.check_model(to_proto(loaded), full_check=True)
