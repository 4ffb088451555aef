"""Q/DQ around activations: where they would end ONNX Runtime, there are none."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from quark.onnx import quantize_static
from quark.onnx.qdq.activations import MOVED_THROUGH
from tests.models.onnx_bodies import identity_if
from tests.models.onnx_zoo import Builder, Reader, run

MORE = {"Reshape": [[-1, 2, 2, 2]], "Slice": [[0], [2], [1]], "Squeeze": [[1]], "Unsqueeze": [[0]]}


@pytest.mark.parametrize("op_type", MOVED_THROUGH)
def test_no_pair_stands_before_what_a_body_reads_through_a_move(op_type: str) -> None:
    """DequantizeLinear, then such a node, then a body that reads it: ONNX Runtime 1.31 ends the process."""
    b = Builder()
    weight = b.constant("w", b.random.normal(0, 0.5, (2, 2)))
    product = b.node("MatMul", ["x", weight], "product")
    constants = [b.integers(f"k{index}", values) for index, values in enumerate(MORE.get(op_type, []))]
    attributes = {"kernel_shape": [1, 1]} if op_type == "MaxPool" else {}
    b.node(op_type, [product, *constants], "moved", **attributes)
    b.node("MatMul", [product, weight], "y")
    rank = {"Squeeze": 3, "Unsqueeze": 5}.get(op_type, 4)
    identity_if(b, "moved", "copied", rank)
    model = b.model({"x": [2, 1, 2, 2]}, {"copied": [None] * rank, "y": [2, 1, 2, 2]})
    feeds = [{"x": np.random.default_rng(seed).normal(size=(2, 1, 2, 2)).astype(np.float32)} for seed in range(4)]
    quantized = quantize_static(model, None, Reader(feeds))
    assert quantized is not None
    producers = {output: node for node in quantized.graph.node for output in node.output}
    (move,) = (node for node in quantized.graph.node if node.op_type == op_type)
    assert producers[move.input[0]].op_type == "MatMul"
    assert any(node.op_type == "DequantizeLinear" and node.name.startswith("product") for node in quantized.graph.node)
    onnx.checker.check_model(quantized)
    assert run(quantized, feeds[0]).size == 8
