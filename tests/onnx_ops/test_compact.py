"""What is left out of a file is what ONNX's shape inference and ONNX Runtime give back."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.onnx_ops.compact import drop_inferable, share_constants

F = TensorProto.FLOAT


def model(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], **infos: list[int | str]) -> onnx.ModelProto:
    """x (n, 4) -> y; `infos` are shapes of tensors within."""
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    inside = [helper.make_tensor_value_info(name, F, shape) for name, shape in infos.items()]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", F, ["n", 4])],
        [helper.make_tensor_value_info("y", F, None)],
        tensors,
        value_info=inside,
    )
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=8)


def left(made: onnx.ModelProto) -> dict[str, list[int]]:
    """The shapes that stay within the graph, 0 for open sizes."""
    inside = ir.from_proto(made)
    drop_inferable(inside)
    infos = ir.to_proto(inside).graph.value_info
    return {info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in infos}


def test_what_follows_from_the_inputs_is_left_out() -> None:
    """Large weights are not looked at, and come back."""
    weight = np.ones((4, 300), np.float32)
    made = model(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        {"w": weight},
        h=["n", 300],
        w=[4, 300],
    )
    inside = ir.from_proto(made)
    assert drop_inferable(inside) == 2
    written = ir.to_proto(inside)
    assert not written.graph.value_info
    np.testing.assert_array_equal(numpy_helper.to_array(written.graph.initializer[0]), weight)


def test_pairs_of_the_runtime_own_domain_are_seen_through() -> None:
    one, zero = np.float32(1), np.int8(0)
    pair = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], domain="com.microsoft"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], domain="com.microsoft"),
        helper.make_node("Relu", ["d"], ["y"]),
    ]
    assert left(model(pair, {"s": np.asarray(one), "z": np.asarray(zero)}, d=["n", 4])) == {}


def test_behind_an_operator_that_inference_does_not_know_its_output_alone_stays() -> None:
    nodes = [
        helper.make_node("Odd", ["x"], ["odd"], domain="own"),
        helper.make_node("Relu", ["odd"], ["r"]),
        helper.make_node("Odd", ["r"], ["again"], domain="own"),
        helper.make_node("Relu", ["again"], ["y"]),
    ]
    assert left(model(nodes, {}, odd=["n", 7], r=["n", 7], again=["n", 9])) == {"odd": [0, 7], "again": [0, 9]}


def test_a_size_that_the_exporter_knew_and_inference_does_not_find_stays() -> None:
    """The shape is an arithmetic of one that is only known as the model runs."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Mul", ["s", "one"], ["t"]),
        helper.make_node("Reshape", ["x", "t"], ["e"]),
        helper.make_node("Relu", ["e"], ["y"]),
    ]
    assert left(model(nodes, {"one": np.array([1, 1], np.int64)}, e=["n", 4])) == {"e": [0, 4]}


def test_the_inside_of_bodies_is_left_out_too() -> None:
    relu = helper.make_node("Relu", ["x"], ["inner"])
    negative = helper.make_node("Neg", ["inner"], ["out"])
    bodies = {
        name: helper.make_graph(
            [relu, negative],
            name,
            [],
            [helper.make_tensor_value_info("out", F, None)],
            value_info=[helper.make_tensor_value_info("inner", F, ["n", size])],
        )
        # The second contradicts what follows, so it says something.
        for name, size in (("then_branch", 4), ("else_branch", 5))
    }
    node = helper.make_node("If", ["c"], ["y"], **bodies)
    inside = ir.from_proto(model([node], {"c": np.array(True)}))
    drop_inferable(inside)
    (written,) = ir.to_proto(inside).graph.node
    stay = {attribute.name: [info.name for info in attribute.g.value_info] for attribute in written.attribute}
    assert stay == {"then_branch": [], "else_branch": ["inner"]}


@pytest.mark.parametrize("dtype", ["float32", "int8", "int64"])
def test_constants_of_the_same_bits_become_one(dtype: str) -> None:
    """-0.0 is not 0.0, nor is a vector a scalar, nor one type another; the model computes the same."""
    one, minus = np.array([0, 1, 2, 3], dtype), np.array([-0.0 if dtype == "float32" else -1, 1, 2, 3], dtype)
    nodes = [helper.make_node("Cast", [name], [f"{name}_f"], to=F) for name in ("a", "b", "c", "d")]
    nodes += [
        helper.make_node("Add", ["x", "a_f"], ["ab"]),
        helper.make_node("Mul", ["ab", "b_f"], ["bc"]),
        helper.make_node("Sub", ["bc", "c_f"], ["cd"]),
        helper.make_node("Div", ["cd", "d_f"], ["y"]),
    ]
    constants = {"a": one, "b": one.copy(), "c": minus, "d": one[None].copy()}
    made = model(nodes, constants)
    inside = ir.from_proto(made)
    assert share_constants(inside) == 1
    assert list(inside.graph.initializers) == ["a", "c", "d"]
    feed = {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}
    before, after = (
        onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feed)[0]
        for proto in (made, ir.to_proto(inside))
    )
    np.testing.assert_array_equal(before, after)


def test_an_input_with_a_default_and_an_output_keep_their_own() -> None:
    values = np.array([1, 2, 3, 4], np.float32)
    nodes = [helper.make_node("Add", ["x", "a"], ["h"]), helper.make_node("Add", ["h", "b"], ["y"])]
    made = model(nodes, {"a": values, "b": values, "c": values})
    made.graph.input.append(helper.make_tensor_value_info("b", F, [4]))
    made.graph.output.append(helper.make_tensor_value_info("c", F, [4]))
    assert share_constants(ir.from_proto(made)) == 0


def test_a_constant_that_is_an_output_keeps_its_type() -> None:
    made = model([helper.make_node("Add", ["x", "w"], ["y"])], {"w": np.ones((1, 4), np.float32)})
    made.graph.output.append(helper.make_tensor_value_info("w", F, [1, 4]))
    inside = ir.from_proto(made)
    drop_inferable(inside)
    assert ir.to_proto(inside).graph.output[1] == made.graph.output[1]
