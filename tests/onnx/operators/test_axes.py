"""The axes that a rule says are those that the op itself has, as numpy computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from quark.onnx.operators import ON_REQUEST, RULES, data_axis, input_axis, output_axis, result_axis

Array = np.ndarray[Any, Any]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Conv": ("Conv", {}),
    "Conv, 2 groups": ("Conv", {"group": 2}),
    "Conv, depthwise": ("Conv", {"group": 4}),
    "ConvTranspose": ("ConvTranspose", {}),
    "ConvTranspose, 2 groups": ("ConvTranspose", {"group": 2}),
    "ConvTranspose, depthwise": ("ConvTranspose", {"group": 4}),
    "Gemm": ("Gemm", {}),
    "Gemm, transA": ("Gemm", {"transA": 1}),
    "Gemm, transB": ("Gemm", {"transB": 1}),
    "Gemm, transA and transB": ("Gemm", {"transA": 1, "transB": 1}),
    "MatMul of a matrix": ("MatMul", {}),
    "MatMul of a stack": ("MatMul", {}),
}
POSITIONS = 5


def shapes(name: str, inputs: int, outputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of data and weight of a layer with so many channels."""
    op_type, attributes = CASES[name]
    group = attributes.get("group", 1)
    if op_type == "Conv":
        return (2, inputs, POSITIONS, POSITIONS), (outputs, inputs // group, 3, 2)
    if op_type == "ConvTranspose":
        return (2, inputs, POSITIONS, POSITIONS), (inputs, outputs // group, 3, 2)
    data, weight = (POSITIONS, inputs), (inputs, outputs)
    if op_type == "MatMul":
        return ((2, *data), (2, *weight)) if "stack" in name else (data, weight)
    return data[:: -1 if "transA" in attributes else 1], weight[:: -1 if "transB" in attributes else 1]


def layer(op_type: str, attributes: dict[str, Any]) -> ir.Node:
    return ir.node(op_type, [ir.Value(name="x"), ir.Value(name="w")], attributes)


def along(vector: Array, rank: int, axis: int) -> Array:
    shape = [1] * rank
    shape[axis] = -1
    return vector.reshape(shape)


def tiled(vector: Array, size: int) -> Array:
    """The channels of one group as those of all groups."""
    return np.tile(vector, size // len(vector))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=10, deadline=None)
@given(inputs=st.sampled_from([4, 8]), outputs=st.sampled_from([4, 8, 12]), seed=st.integers(0, 99))
def test_scales_of_channels_move_between_data_weight_and_result(
    name: str, inputs: int, outputs: int, seed: int
) -> None:
    op_type, attributes = CASES[name]
    node = layer(op_type, attributes)
    random = np.random.default_rng(seed)
    x, w = (random.normal(size=shape) for shape in shapes(name, inputs, outputs))
    # The evaluator has no ConvTranspose with groups: each of them is one without.
    groups = attributes.get("group", 1) if op_type == "ConvTranspose" else 1
    alone = {key: value for key, value in attributes.items() if groups == 1}
    evaluator = ReferenceEvaluator(onnx.helper.make_node(op_type, ["x", "w"], ["y"], **alone))

    def run(x: Array, w: Array) -> Array:
        parts = zip(np.split(x, groups, axis=1), np.split(w, groups), strict=True)
        return np.concatenate([evaluator.run(None, {"x": x, "w": w})[0] for x, w in parts], axis=1)

    y = run(x, w)
    data, result = data_axis(node), result_axis(node)
    assert data is not None and result is not None
    assert x.shape[data] == inputs and y.shape[result] == outputs
    by_output = random.uniform(0.5, 2, w.shape[output_axis(node)])
    scaled = y * along(tiled(by_output, outputs), y.ndim, result)
    np.testing.assert_allclose(run(x, w * along(by_output, w.ndim, output_axis(node))), scaled, rtol=1e-9, atol=1e-9)
    by_input = random.uniform(0.5, 2, w.shape[input_axis(node)])
    divided = x / along(tiled(by_input, inputs), x.ndim, data)
    np.testing.assert_allclose(run(divided, w * along(by_input, w.ndim, input_axis(node))), y, rtol=1e-9, atol=1e-9)


def test_every_op_type_with_a_weight_is_tried() -> None:
    assert {op_type for op_type, _ in CASES.values()} == {
        op_type for op_type, rule in {**RULES, **ON_REQUEST}.items() if rule.weight is not None
    }


@pytest.mark.parametrize(("op_type", "axis"), [("Softmax", -2), ("LayerNormalization", -1), ("Softmax", None)])
def test_a_node_with_an_axis_of_its_own_sums_over_that(op_type: str, axis: int | None) -> None:
    attributes = {} if axis is None else {"axis": axis}
    node = layer(op_type, attributes)
    assert data_axis(node) == result_axis(node) == (-1 if axis is None else axis)
    assert data_axis(layer("Relu", {})) is None
