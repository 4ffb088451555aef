"""Small models with something odd in them: each must come out right, or be refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.models.onnx_zoo import Array, Builder

Make = Callable[[], onnx.ModelProto]
ROW: dict[str, Any] = {"x": ["n", 8]}
IMAGE: dict[str, Any] = {"x": ["n", 4, 6, 6]}
PADS = [1, 1, 1, 1]


class Odd(Builder):
    """A Builder of seeded weights, nodes with many outputs, and inputs of any type."""

    def weight(self, name: str, *shape: int, size: float = 0.3) -> str:
        return self.constant(name, self.random.normal(0, size, shape))

    def raw(self, op_type: str, inputs: list[str], made: list[str], **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, made, name=f"{made[0]}_node", **attributes))
        return made[0]

    def finish(self, inputs: dict[str, Any], made: dict[str, Any], opset: int = 17, more: Any = ()) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "g", infos(inputs), infos(made), self.initializers)
        imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in more)]
        return onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=imports, ir_version=9))


def infos(shapes: dict[str, Any]) -> list[Any]:
    """A list is a shape of float32; a pair has another element type first."""
    typed = {name: (TensorProto.FLOAT, shape) if isinstance(shape, list) else shape for name, shape in shapes.items()}
    return [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in typed.items()]


def body(nodes: list[tuple[str, list[str], str]], inputs: dict[str, Any], made: dict[str, Any]) -> onnx.GraphProto:
    named = [helper.make_node(op_type, read, [out], name=f"{out}_body") for op_type, read, out in nodes]
    return helper.make_graph(named, "body", infos(inputs), infos(made))


def linear(*shape: int, name: str = "w", **made: Any) -> onnx.ModelProto:
    b = Odd()
    b.node("MatMul", ["x", b.weight(name, *(shape or (8, 8)))], "y")
    return b.finish(ROW, {"y": ["n", 8], **made})


# Names and outputs. ---------------------------------------------------------------------------------------------------


def long_names() -> onnx.ModelProto:
    b = Odd()
    hidden = b.node("MatMul", ["x", b.weight("/β/w:0", 8, 8)], "/mod.él/h" * 40)
    b.node("MatMul", [hidden, b.weight("w", 8, 8)], "y")
    return b.finish(ROW, {"y": ["n", 8]})


def names_that_quantizing_gives() -> onnx.ModelProto:
    b = Odd()
    x = b.node("MatMul", ["x", b.weight("x_scale", 8, 8)], "x_QuantizeLinear")
    x = b.node("MatMul", [x, b.weight("x_zero_point", 8, 8)], "x_DequantizeLinear_Output")
    b.nodes[-1].name = "x_DequantizeLinear"
    b.node("MatMul", [x, b.weight("x_scale_quantized", 8, 8)], "y")
    return b.finish(ROW, {"y": ["n", 8]})


def an_unused_initializer() -> onnx.ModelProto:
    model = linear()
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "never"))
    return model


def three_outputs_of_one_tensor() -> onnx.ModelProto:
    b = Odd()
    b.node("MatMul", ["x", b.weight("w", 8, 8)], "h")
    b.node("Relu", ["h"], "y")
    b.node("Identity", ["h"], "z")
    return b.finish(ROW, {name: ["n", 8] for name in "hyz"})


def nodes_out_of_order() -> onnx.ModelProto:
    model = one_matrix_read_three_times()
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


# Bodies, functions, other types. --------------------------------------------------------------------------------------


def a_loop() -> onnx.ModelProto:
    b = Odd()
    b.node("MatMul", ["x", b.weight("w", 8, 8)], "h")
    b.integers("trip", 3)
    b.initializers.append(numpy_helper.from_array(np.array(True), "go"))
    steps = [("Identity", ["c"], "c2"), ("Add", ["s", "h"], "s2"), ("MatMul", ["s2", "w"], "s3")]
    state = {"i": (TensorProto.INT64, []), "c": (TensorProto.BOOL, []), "s": ["n", 8]}
    loop = body(steps, state, {"c2": (TensorProto.BOOL, []), "s3": ["n", 8]})
    b.raw("Loop", ["trip", "go", "h"], ["last"], body=loop)
    b.node("MatMul", ["last", "w"], "y")
    return b.finish(ROW, {"y": ["n", 8]})


def a_scan() -> onnx.ModelProto:
    b = Odd()
    b.node("MatMul", ["x", b.weight("w", 8, 8)], "h")
    steps = [("Add", ["s", "e"], "t"), ("MatMul", ["t", "w"], "u"), ("Tanh", ["u"], "v"), ("Identity", ["v"], "o")]
    scan = body(steps, {"s": [8], "e": [8]}, {"v": [8], "o": [8]})
    b.raw("Scan", [b.constant("zero", np.zeros(8)), "h"], ["state", "all"], body=scan, num_scan_inputs=1)
    b.node("MatMul", ["all", "w"], "y")
    return b.finish(ROW, {"y": ["n", 8]})


def branches_that_only_pass_on() -> onnx.ModelProto:
    b = Odd()
    for name in ("left", "right"):
        b.node("MatMul", ["x", b.weight(f"{name}_w", 8, 8)], name)
    b.node("Greater", [b.node("ReduceMax", ["x"], "most", keepdims=0), b.constant("zero", np.array(0.0))], "yes")
    bodies = [body([("Identity", [name], f"{name}_out")], {}, {f"{name}_out": ["n", 8]}) for name in ("left", "right")]
    b.raw("If", ["yes"], ["chosen"], then_branch=bodies[0], else_branch=bodies[1])
    b.node("Relu", ["chosen"], "y")
    return b.finish(ROW, {"y": ["n", 8]})


def a_local_function() -> onnx.ModelProto:
    b = Odd()
    w = b.weight("w", 8, 8)
    b.node("MatMul", ["x", w], "h")
    b.raw("Twice", ["h", w], ["k"], domain="mine")
    b.node("MatMul", ["k", w], "y")
    steps = [helper.make_node("Neg", ["a"], ["t"]), helper.make_node("MatMul", ["t", "m"], ["c"])]
    model = b.finish(ROW, {"y": ["n", 8]}, more=["mine"])
    model.functions.append(helper.make_function("mine", "Twice", ["a", "m"], ["c"], steps, model.opset_import[:1]))
    return model


def another_domain() -> onnx.ModelProto:
    b = Odd()
    gelu = b.raw("Gelu", ["x"], ["g"], domain="com.microsoft")
    fused = b.raw("FusedMatMul", [gelu, b.weight("w", 8, 8)], ["h"], domain="com.microsoft", alpha=2.0)
    b.node("MatMul", [fused, b.weight("w2", 8, 8)], "y")
    return b.finish(ROW, {"y": ["n", 8]}, more=["com.microsoft"])


def strings() -> onnx.ModelProto:
    b = Odd()
    same = b.raw("Cast", [b.node("Equal", ["t", "t"], "same")], ["number"], to=TensorProto.FLOAT)
    b.node("MatMul", [same, b.weight("w", 8, 8)], "y")
    return b.finish({"t": (TensorProto.STRING, ["n", 8])}, {"y": ["n", 8]}, opset=19)


def sequences() -> onnx.ModelProto:
    b = Odd()
    b.raw("SequenceConstruct", [b.node("MatMul", ["x", b.weight("w", 8, 8)], "h"), "x"], ["s"])
    b.node("MatMul", [b.node("ConcatFromSequence", ["s"], "c", axis=1), b.weight("w2", 16, 8)], "y")
    return b.finish(ROW, {"y": ["n", 8]})


def an_optional() -> onnx.ModelProto:
    b = Odd()
    b.raw("Optional", [b.node("MatMul", ["x", b.weight("w", 8, 8)], "h")], ["o"])
    b.node("MatMul", [b.node("OptionalGetElement", ["o"], "h2"), b.weight("w2", 8, 8)], "y")
    return b.finish(ROW, {"y": ["n", 8]}, opset=18)


def a_loop_that_makes_a_sequence() -> onnx.ModelProto:
    b, rows = Odd(), helper.make_tensor_sequence_value_info
    names = [b.weight("w", 8, 8), b.weight("w2", 8, 8)]
    steps = [
        ("SequenceAt", ["rows", "step"], "row"), ("MatMul", ["row", names[0]], "made"),
        ("SequenceInsert", ["all", "made"], "more"), ("Identity", ["on"], "go"),
    ]  # fmt: skip
    loop = body(steps, {"step": (TensorProto.INT64, []), "on": (TensorProto.BOOL, [])}, {"go": (TensorProto.BOOL, [])})
    loop.input.append(rows("all", TensorProto.FLOAT, [1, 8]))
    loop.output.append(rows("more", TensorProto.FLOAT, [1, 8]))
    b.node("SplitToSequence", ["x"], "rows", axis=0)
    state = [b.node("SequenceLength", ["rows"], "count"), "", b.raw("SequenceEmpty", [], ["none"])]
    b.node(
        "MatMul", [b.node("ConcatFromSequence", [b.raw("Loop", state, ["found"], body=loop)], "c", axis=0), "w2"], "y"
    )
    return b.finish(ROW, {"y": ["n", 8]})


def integers_in_elementwise_nodes() -> onnx.ModelProto:
    b = Odd()
    whole = b.node("Add", [b.raw("Cast", ["x"], ["i"], to=TensorProto.INT64), b.integers("one", [1])], "more")
    both = b.node("Concat", [b.node("Mul", [whole, whole], "square"), whole], "both", axis=1)
    b.node("MatMul", [b.raw("Cast", [both], ["f"], to=TensorProto.FLOAT), b.weight("w", 16, 8)], "y")
    return b.finish(ROW, {"y": ["n", 8]})


def a_part_in_float64() -> onnx.ModelProto:
    b = Odd()
    wide = b.raw("Cast", ["x"], ["wide"], to=TensorProto.DOUBLE)
    b.initializers.append(numpy_helper.from_array(b.random.normal(0, 0.3, (8, 8)), "w64"))
    back = b.raw("Cast", [b.node("MatMul", [wide, "w64"], "product")], ["back"], to=TensorProto.FLOAT)
    b.node("MatMul", [back, b.weight("w", 8, 8)], "y")
    return b.finish(ROW, {"y": ["n", 8]})


def all_in_float64() -> onnx.ModelProto:
    b = Odd()
    b.initializers.append(numpy_helper.from_array(b.random.normal(0, 0.3, (8, 8)), "w"))
    b.node("MatMul", ["x", "w"], "y")
    return b.finish({"x": (TensorProto.DOUBLE, ["n", 8])}, {"y": (TensorProto.DOUBLE, ["n", 8])})


def recurrent() -> onnx.ModelProto:
    b = Odd()
    x = b.node("MatMul", ["x", b.weight("w", 8, 8)], "h")
    b.raw("LSTM", [x, *(b.weight(n, *s) for n, s in (("W", (1, 16, 8)), ("R", (1, 16, 4)), ("B", (1, 32))))],
          ["lstm", "state"], hidden_size=4)  # fmt: skip
    x = b.node("Squeeze", ["lstm", b.integers("one", [1])], "squeezed")
    x = b.raw("GRU", [x, b.weight("W2", 1, 12, 4), b.weight("R2", 1, 12, 4)], ["gru"], hidden_size=4)
    b.node("MatMul", [b.node("Squeeze", [x, "one"], "flat"), b.weight("w2", 4, 4)], "y")
    return b.finish({"x": [6, 3, 8]}, {"y": [6, 3, 4], "state": [1, 3, 4]})


# Weights and biases. --------------------------------------------------------------------------------------------------


def one_matrix_read_three_times() -> onnx.ModelProto:
    b = Odd()
    w = b.weight("w", 8, 8)
    b.node("Gemm", [b.node("MatMul", [b.node("MatMul", ["x", w], "h"), w], "g"), w], "y", transB=1)
    return b.finish(ROW, {"y": ["n", 8]})


def a_kernel_that_is_gathered_too() -> onnx.ModelProto:
    b = Odd()
    w = b.weight("w", 4, 4, 3, 3)
    x = b.node("Conv", ["x", w], "c", pads=PADS)
    b.node("Conv", [x, b.node("Gather", [w, b.integers("rows", [0, 3])], "g", axis=0)], "y", pads=PADS)
    return b.finish(IMAGE, {"y": ["n", 2, 6, 6]})


def embedding_and_head() -> onnx.ModelProto:
    b = Odd()
    w = b.weight("w", 16, 8)
    x = b.node("Gather", [w, "ids"], "e")
    b.node("MatMul", [x, b.node("Transpose", [w], "turned", perm=[1, 0])], "y")
    return b.finish({"ids": (TensorProto.INT64, ["n", 5])}, {"y": ["n", 5, 16]})


def matrices_of_other_ranks() -> onnx.ModelProto:
    b = Odd()
    product = b.node("MatMul", [b.weight("p", 4, 8), b.weight("q", 8, 8)], "pq")
    b.node("MatMul", [product, b.node("MatMul", ["x", b.weight("v", 8)], "vector")], "left")
    b.node("MatMul", [b.weight("u", 8), b.node("MatMul", ["x", b.weight("w", 8, 8)], "square")], "right")
    b.node("MatMul", [b.node("Unsqueeze", ["x", b.integers("zero", [0])], "deep"), b.weight("stack", 3, 8, 6)], "y")
    return b.finish({"x": [8, 8]}, {"y": [3, 8, 6], "left": [4], "right": [8]})


def factors_of_gemm() -> onnx.ModelProto:
    b = Odd()
    x = b.node("Gemm", ["x", b.weight("w", 8, 8), b.weight("c", 8, size=2)], "h", alpha=0.5, beta=2.0, transB=1)
    b.node("Gemm", [x, b.weight("w2", 4, 6), b.constant("c2", np.array(0.7))], "y", transA=1, alpha=1.5)
    return b.finish({"x": [4, 8]}, {"y": [8, 6]})


def biases_of_every_shape() -> onnx.ModelProto:
    b = Odd()
    x = "x"
    for index, shape in enumerate([(4, 8), (4, 1), (1, 8), (1,), (8,)]):
        x = b.node("Gemm", [x, b.weight(f"w{index}", 8, 8), b.weight(f"c{index}", *shape, size=2)], f"h{index}")
    b.node("Identity", [x], "y")
    return b.finish({"x": [4, 8]}, {"y": [4, 8]})


def weights_that_are_inputs() -> onnx.ModelProto:
    b = Odd()
    b.node("Gemm", ["x", "w", "c"], "y", transB=1)
    return b.finish({**ROW, "w": [6, 8], "c": [6]}, {"y": ["n", 6]})


def channels_of_zeros() -> onnx.ModelProto:
    b = Odd()
    weight = b.random.normal(0, 0.3, (8, 8)) * (np.arange(8) != 2)
    x = b.node("Gemm", ["x", b.constant("w", weight), b.weight("c", 8)], "h")
    b.node("Add", [b.node("MatMul", [x, b.constant("z", np.zeros((8, 8)))], "nothing"), "x"], "y")
    return b.finish(ROW, {"y": ["n", 8], "h": ["n", 8]})


def a_bias_beyond_int32() -> onnx.ModelProto:
    b = Odd()
    b.node("Gemm", ["x", b.weight("w", 8, 8, size=1e-7), b.weight("c", 8, size=100)], "y")
    return b.finish(ROW, {"y": ["n", 8]})


def kernels_of_one_and_three_axes() -> onnx.ModelProto:
    b = Odd()
    x = b.node("Conv", ["x", b.weight("w", 6, 4, 3), b.weight("c", 6)], "h", pads=[1, 1])
    b.node("Conv", [b.node("Unsqueeze", [x, b.integers("axes", [2, 3])], "deep"), b.weight("w3", 4, 6, 1, 1, 3)], "y")
    return b.finish({"x": ["n", 4, 10]}, {"y": ["n", 4, 1, 1, 8]})


def groups() -> onnx.ModelProto:
    b = Odd()
    x = b.node("Conv", ["x", b.weight("w", 8, 2, 3, 3), b.weight("c", 8)], "h", pads=PADS, group=2)
    x = b.node("ConvTranspose", [x, b.weight("t", 8, 3, 2, 2), b.weight("tc", 6)], "up", group=2, strides=[2, 2])
    b.node("ConvTranspose", [x, b.weight("d", 6, 1, 2, 2), b.weight("dc", 6)], "y", group=6)
    return b.finish(IMAGE, {"y": ["n", 6, 13, 13]})


def one_bias_of_three() -> onnx.ModelProto:
    b = Odd()
    bias = b.weight("c", 4, size=1)
    x = b.node("Conv", ["x", b.weight("w", 4, 4, 3, 3), bias], "h", pads=PADS)
    left, right = b.node("Conv", [x, b.weight("w2", 4, 4, 1, 1), bias], "l"), b.weight("w3", 4, 4, 1, 1, size=2)
    b.node("Add", [left, b.node("Conv", ["x", right, bias], "r")], "y")
    return b.finish(IMAGE, {"y": ["n", 4, 6, 6]})


# Shapes of the graph. -------------------------------------------------------------------------------------------------


def a_tensor_with_itself() -> onnx.ModelProto:
    b = Odd()
    x = b.node("MatMul", [b.node("Concat", ["x", "x"], "c", axis=1), b.weight("w", 16, 8)], "h")
    x = b.node("MatMul", [x, x], "squared")
    b.node("Add", [b.node("Mul", [x, x], "power"), x], "y")
    return b.finish({"x": [8, 8]}, {"y": [8, 8]})


def unequal_parts() -> onnx.ModelProto:
    b = Odd()
    b.raw("Split", ["x", b.integers("sizes", [1, 5, 2])], ["a", "b", "c"], axis=1)
    b.node("Concat", ["a", b.node("MatMul", ["c", b.weight("w", 2, 4)], "h")], "y", axis=1)
    return b.finish(ROW, {"y": ["n", 5]})


def inputs_left_out() -> onnx.ModelProto:
    b = Odd()
    x = b.node("Resize", ["x", "", b.constant("scales", np.array([1, 1, 2, 2.0]))], "twice", mode="nearest")
    x = b.node("Pad", [x, b.integers("pads", [0, 0, 1, 1, 0, 0, 1, 1]), ""], "padded")
    x = b.node("Resize", [x, "", "", b.integers("sizes", [1, 4, 7, 7])], "small", mode="linear")
    b.node("Conv", [b.node("Pad", [x, "pads", b.constant("fill", np.array(1.5))], "last"), b.weight("w", 4, 4, 3, 3)],
           "y")  # fmt: skip
    return b.finish({"x": [1, 4, 5, 5]}, {"y": [1, 4, 7, 7]})


def indices_of_a_pool() -> onnx.ModelProto:
    b = Odd()
    size = {"kernel_shape": [2, 2], "strides": [2, 2]}
    b.raw("MaxPool", ["x"], ["p", "where"], **size)
    b.node("Conv", [b.node("MaxUnpool", ["p", "where"], "u", **size), b.weight("w", 4, 4, 1, 1)], "y")
    return b.finish(IMAGE, {"y": ["n", 4, 6, 6]})


def divisors_of_all_sizes() -> onnx.ModelProto:
    b = Odd()
    wide = b.node("Div", ["x", b.constant("d", np.array([1e-3, 1, 10, 100, 1000, 2, 3, 4.0]))], "q")
    b.node("Sub", [b.constant("one", np.array(1.0)), wide], "y")
    return b.finish(ROW, {"y": ["n", 8]})


def a_flat_softmax() -> onnx.ModelProto:
    """No probability of a pair is over 0.55."""
    b = Odd()
    x = b.node("MatMul", ["x", b.weight("w", 8, 2, size=0.02)], "h")
    b.node("Softmax", [x], "y")
    return b.finish(ROW, {"y": ["n", 2]})


def rows_that_are_empty() -> onnx.ModelProto:
    b = Odd()
    empty = b.node("MatMul", ["x", b.constant("none", np.zeros((8, 0)))], "e")
    b.node("Concat", [empty, b.node("MatMul", ["x", b.weight("w", 8, 8)], "h")], "y", axis=1)
    return b.finish(ROW, {"y": ["n", 8]})


def a_cache_that_is_empty_at_first() -> onnx.ModelProto:
    """Keys of no token yet, as the first call of a language model has them: no values, and so no range."""
    b = Odd()
    past = b.node("ConstantOfShape", [b.integers("none", [0, 8])], "past")
    b.node("Concat", [b.node("Mul", [past, b.constant("one", np.ones(1))], "kept"), "x"], "all", axis=0)
    b.node("MatMul", ["all", b.weight("w", 8, 8)], "y")
    return b.finish(ROW, {"y": ["n", 8]})


def a_mask_of_minus_infinity() -> onnx.ModelProto:
    """What a causal mask puts before a Softmax."""
    b = Odd()
    scores = b.node("MatMul", ["x", b.weight("w", 8, 8)], "scores")
    b.constant("least", np.array(-np.inf))
    masked = b.node(
        "Where", [b.node("Less", ["gate", b.constant("half", np.array(0.5))], "open"), scores, "least"], "m"
    )
    b.constant("gate", np.arange(8) / 8)
    b.node("MatMul", [b.node("Softmax", [masked], "p"), b.weight("v", 8, 8)], "y")
    return b.finish(ROW, {"y": ["n", 8]})


def initializers_that_are_no_inputs() -> onnx.ModelProto:
    """Of IR version 3, which asks for that; runtimes do not."""
    model = linear(8, 8)
    model.ir_version, model.opset_import[0].version = 3, 9
    return model


def input_as_output() -> onnx.ModelProto:
    return linear(x=["n", 8])


def initializer_as_output() -> onnx.ModelProto:
    return linear(w=[8, 8])


RIGHT: tuple[Make, ...] = (
    long_names, names_that_quantizing_gives, an_unused_initializer, three_outputs_of_one_tensor, nodes_out_of_order,
    rows_that_are_empty,
    a_cache_that_is_empty_at_first,
    a_mask_of_minus_infinity,
    initializers_that_are_no_inputs,
    input_as_output, initializer_as_output, a_loop, a_scan, branches_that_only_pass_on, a_local_function,
    another_domain, strings, sequences, an_optional, a_loop_that_makes_a_sequence,
    integers_in_elementwise_nodes, a_part_in_float64, recurrent,
    one_matrix_read_three_times, a_kernel_that_is_gathered_too, embedding_and_head, matrices_of_other_ranks,
    factors_of_gemm, biases_of_every_shape, weights_that_are_inputs, channels_of_zeros, a_bias_beyond_int32,
    kernels_of_one_and_three_axes, groups, one_bias_of_three, a_tensor_with_itself, unequal_parts, inputs_left_out,
    indices_of_a_pool, divisors_of_all_sizes, a_flat_softmax,
)  # fmt: skip


def sample(model: onnx.ModelProto, seed: int = 1, size: int = 3) -> dict[str, Array]:
    """Seeded data for inputs of any type; open dimensions have `size`."""
    random = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for value in model.graph.input:
        kind, shape = value.type.tensor_type.elem_type, [d.dim_value or size for d in value.type.tensor_type.shape.dim]
        if kind == TensorProto.STRING:
            found[value.name] = random.choice(["a", "b"], shape).astype(object)
        elif kind == TensorProto.INT64:
            found[value.name] = random.integers(0, 16, shape)
        else:
            found[value.name] = random.normal(size=shape).astype(helper.tensor_dtype_to_np_dtype(kind))
    return found
