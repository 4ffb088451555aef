"""Small ONNX models with seeded random weights, and readers for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from tests.models.onnx_sessions import exact_options

Array = np.ndarray[Any, Any]


class Reader:
    """Yields the given feeds, then None."""

    def __init__(self, feeds: Iterable[Any]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> Any:
        return next(self._feeds, None)


class Builder:
    """Collects nodes and initializers."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def constant(self, name: str, array: Array) -> str:
        self.initializers.append(numpy_helper.from_array(np.asarray(array, np.float32), name))
        return name

    def integers(self, name: str, values: Any) -> str:
        self.initializers.append(numpy_helper.from_array(np.asarray(values, np.int64), name))
        return name

    def node(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=f"{output}_node", **attributes))
        return output

    def conv(self, x: str, name: str, shape: tuple[int, int, int], group: int = 1, norm: bool = True) -> str:
        cin, cout, k = shape
        fan = cin // group * k * k
        weight = self.constant(f"{name}_w", self.random.normal(0, (2 / fan) ** 0.5, (cout, cin // group, k, k)))
        y = self.node("Conv", [x, weight], f"{name}_conv", kernel_shape=[k, k], pads=[k // 2] * 4, group=group)
        if not norm:
            return y
        draw = self.random
        values = {"g": draw.uniform(0.5, 1.5, cout), "b": draw.normal(0, 0.1, cout), "m": draw.normal(0, 0.1, cout)}
        names = [self.constant(f"{name}_{key}", value) for key, value in values.items()]
        names.append(self.constant(f"{name}_v", draw.uniform(0.5, 1.5, cout)))
        return self.node("BatchNormalization", [y, *names], f"{name}_norm")

    def model(self, inputs: dict[str, list[Any]], outputs: dict[str, list[Any]], opset: int = 17) -> onnx.ModelProto:
        def values(shapes: dict[str, list[Any]]) -> list[Any]:
            return [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in shapes.items()]

        graph = helper.make_graph(self.nodes, "g", values(inputs), values(outputs), self.initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
        onnx.checker.check_model(model)
        return onnx.shape_inference.infer_shapes(model)


def cnn(opset: int = 17) -> onnx.ModelProto:
    """Residual, depthwise, Concat, pooling and BatchNormalization; input x (n, 3, 16, 16), output y (n, 10)."""
    b = Builder()
    x = b.node("Relu", [b.conv("x", "stem", (3, 16, 3))], "stem")
    left = b.node("Relu", [b.conv(x, "a", (16, 16, 3))], "a")
    total = b.node("Add", [x, b.conv(left, "b", (16, 16, 3))], "sum")
    total = b.node("Relu", [total], "block")
    deep = b.node("Relu", [b.conv(total, "depth", (16, 16, 3), group=16)], "depth")
    point = b.node("Clip", [b.conv(deep, "point", (16, 24, 1)), b.constant("six_low", np.array(0.0)),
                            b.constant("six_high", np.array(6.0))], "point")  # fmt: skip
    both = b.node("Concat", [point, deep], "both", axis=1)
    pooled = b.node("MaxPool", [both], "pooled", kernel_shape=[2, 2], strides=[2, 2])
    last = b.node("Relu", [b.conv(pooled, "last", (40, 32, 3))], "last")
    flat = b.node("Flatten", [b.node("GlobalAveragePool", [last], "mean")], "flat")
    weight, bias = b.constant("fc_w", b.random.normal(0, 0.2, (32, 10))), b.constant("fc_b", b.random.normal(0, 1, 10))
    b.node("Gemm", [flat, weight, bias], "y")
    return b.model({"x": ["n", 3, 16, 16]}, {"y": ["n", 10]}, opset)


def mlp() -> onnx.ModelProto:
    """MatMul, Add of a constant, Gelu-like tail; input x (n, 32), output y (n, 16)."""
    b = Builder()
    hidden = b.node("MatMul", ["x", b.constant("w1", b.random.normal(0, 0.2, (32, 64)))], "hidden")
    hidden = b.node("Add", [hidden, b.constant("b1", b.random.normal(0, 0.2, 64))], "biased")
    hidden = b.node("Mul", [hidden, b.node("Sigmoid", [hidden], "gate")], "silu")
    b.node("MatMul", [hidden, b.constant("w2", b.random.normal(0, 0.2, (64, 16)))], "y")
    return b.model({"x": ["n", 32]}, {"y": ["n", 16]})


def images(count: int = 4, seed: int = 1) -> list[dict[str, Array]]:
    """Feeds for `cnn`."""
    random = np.random.default_rng(seed)
    return [{"x": random.normal(size=(4, 3, 16, 16)).astype(np.float32)} for _ in range(count)]


def vectors(count: int = 4, seed: int = 1) -> list[dict[str, Array]]:
    """Feeds for `mlp`; many rows, so that ranges of one seed cover another."""
    random = np.random.default_rng(seed)
    return [{"x": random.normal(size=(256, 32)).astype(np.float32)} for _ in range(count)]


def stored(model: onnx.ModelProto) -> dict[str, Array]:
    """Name -> array of every initializer, and of scales and zero points by the tensors whose Q/DQ read them.

    Those of the same bits are one constant, which has one of the names.
    """
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        tensor, _, role = node.name.rpartition("_")
        if role in ("QuantizeLinear", "DequantizeLinear"):
            for suffix, name in zip(("scale", "zero_point"), node.input[1:], strict=False):
                if name in found:
                    found.setdefault(f"{tensor}_{suffix}", found[name])
    return found


def run(model: onnx.ModelProto | str, feed: dict[str, Array], optimise: bool = True) -> Array:
    """First output of a model in stock ONNX Runtime."""
    options = exact_options()
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = model if isinstance(model, str) else model.SerializeToString()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feed)[0])


# Models for graph passes and converters. `feed` gives samples, `outputs` runs one.


def gelus(opset: int = 20) -> onnx.ModelProto:
    """Gelu as exporters write it: exact in two groupings, and by tanh; the erf of one is read elsewhere too."""
    b = Builder()
    half, one, root = (b.constant(n, np.array(v)) for n, v in (("half", 0.5), ("one", 1.0), ("root", 2**0.5)))

    def gate(x: str, name: str) -> str:
        erf = b.node("Erf", [b.node("Div", [x, root], f"{name}_div")], f"{name}_erf")
        return b.node("Add", [one, erf], f"{name}_gate")

    first = b.node("Mul", [b.node("Mul", ["x", gate("x", "a")], "a_mul"), half], "a")
    second = b.node("Mul", [b.node("Mul", [half, first], "b_half"), gate(first, "b")], "b")
    cubed = b.node("Pow", [second, b.constant("three", np.array(3.0))], "cubed")
    cubed = b.node("Mul", [b.constant("k", np.array(0.044715)), cubed], "cubed_k")
    inner = b.node(
        "Mul", [b.node("Add", [second, cubed], "inner_sum"), b.constant("c", np.array(0.7978845608))], "inner"
    )
    tanh = b.node("Add", [b.node("Tanh", [inner], "tanh"), one], "tanh_gate")
    third = b.node("Mul", [half, b.node("Mul", [second, tanh], "c_mul")], "third")
    shown = gate(third, "d")
    b.node("Mul", [b.node("Mul", [third, shown], "d_mul"), half], "y")
    b.node("Neg", [shown], "also")
    return b.model({"x": ["n", 32]}, {"y": ["n", 32], "also": ["n", 32]}, opset)


def _normalized(b: Builder, x: str, name: str, axes: list[int], opset: int = 17) -> tuple[str, str, str]:
    """Mean, centered value and deviation over some axes."""

    def mean(value: str, output: str) -> str:
        if opset < 18:
            return b.node("ReduceMean", [value], output, axes=axes)
        return b.node("ReduceMean", [value, b.integers(f"{output}_axes", axes)], output)

    average = mean(x, f"{name}_mean")
    centered = b.node("Sub", [x, average], f"{name}_centered")
    variance = mean(b.node("Mul", [centered, centered], f"{name}_square"), f"{name}_variance")
    shifted = b.node("Add", [variance, b.constant(f"{name}_eps", np.array(1e-3))], f"{name}_shifted")
    return average, centered, b.node("Sqrt", [shifted], f"{name}_deviation")


def layer_norms(opset: int = 17) -> onnx.ModelProto:
    """Layer normalization with and without beta, over one axis and two."""
    b = Builder()
    _, centered, deviation = _normalized(b, "x", "a", [-1], opset)
    scaled = b.node(
        "Mul", [b.node("Div", [centered, deviation], "a_div"), b.constant("a_g", b.random.normal(1, 1, 8))], "a"
    )
    plain = b.node("Add", [scaled, b.constant("a_b", b.random.normal(0, 1, 8))], "a_out")
    _, centered, deviation = _normalized(b, plain, "b", [1, 2], opset)
    inverse = b.node("Reciprocal", [deviation], "b_inverse")
    b.node("Mul", [b.constant("b_g", b.random.normal(1, 1, (6, 8))), b.node("Mul", [centered, inverse], "b")], "y")
    return b.model({"x": ["n", 6, 8]}, {"y": ["n", 6, 8]}, opset)


def instance_norms(opset: int = 17) -> onnx.ModelProto:
    """Instance normalization in two forms; the second has gamma and beta folded into a factor and a shift."""
    b = Builder()
    shape = (1, 5, 1, 1)
    _, centered, deviation = _normalized(b, "x", "a", [2, 3], opset)
    scaled = b.node(
        "Mul", [b.node("Div", [centered, deviation], "a"), b.constant("a_g", b.random.normal(1, 1, shape))], "ag"
    )
    first = b.node("Add", [scaled, b.constant("a_b", b.random.normal(0, 1, shape[1:]))], "first")
    mean, _, deviation = _normalized(b, first, "b", [2, 3], opset)
    factor = b.node(
        "Mul", [b.node("Reciprocal", [deviation], "inverse"), b.constant("b_g", b.random.normal(1, 1, shape))], "f"
    )
    shift = b.node(
        "Sub", [b.constant("b_b", b.random.normal(0, 1, shape)), b.node("Mul", [mean, factor], "mf")], "shift"
    )
    b.node("Add", [b.node("Mul", [first, factor], "xf"), shift], "y")
    return b.model({"x": ["n", 5, 7, 6]}, {"y": ["n", 5, 7, 6]}, opset)


def l2_norms() -> onnx.ModelProto:
    """L2 normalization by ReduceL2 with Clip and Expand, by a sum of squares, and one with a bound that matters."""
    b = Builder()
    norm = b.node("ReduceL2", ["x"], "norm", axes=[1], keepdims=1)
    bounded = b.node("Clip", [norm, b.constant("tiny", np.array(1e-12))], "bounded")
    shape = b.node("Shape", ["x"], "shape")
    first = b.node("Div", ["x", b.node("Expand", [bounded, shape], "expanded")], "first")
    total = b.node("ReduceSum", [b.node("Mul", [first, first], "square"), b.integers("last", [-1])], "total")
    root = b.node("Sqrt", [b.node("Max", [total, b.constant("floor", np.array(1e-12))], "floored")], "root")
    second = b.node("Mul", [first, b.node("Reciprocal", [root], "inverse")], "second")
    norm = b.node("Clip", [b.node("ReduceL2", [second], "n3", axes=[-1]), b.constant("big", np.array(0.5))], "n3c")
    b.node("Div", [second, norm], "y")
    return b.model({"x": ["n", 6, 8]}, {"y": ["n", 6, 8]})


def pools(opset: int = 17) -> onnx.ModelProto:
    """A BatchNormalization that stands alone, one after Concat, Split, a large pool, means of images, Clip(0, 6)."""
    b = Builder()
    draw, width = b.random, 8

    def norm(x: str, name: str, channels: int) -> str:
        values = [draw.uniform(0.5, 1.5, channels) for _ in range(4)]
        names = [b.constant(f"{name}_{i}", value) for i, value in enumerate(values)]
        return b.node("BatchNormalization", [x, *names], name, epsilon=1e-3)

    alone = norm("x", "alone", 3)
    left, right = b.conv(alone, "left", (3, width, 3), norm=False), b.conv(alone, "right", (3, 4, 1), norm=False)
    joined = norm(b.node("Concat", [left, right], "joined", axis=1), "joined_norm", 12)
    parts = ["part_0", "part_1", "part_2"]
    split = {"split": [4, 4, 4]} if opset < 13 else {}
    b.nodes.append(helper.make_node("Split", [joined], parts, axis=1, name="split", **split))
    clip = [b.constant("low", np.array(0.0)), b.constant("high", np.array(6.0))]
    six = b.node("Clip", [parts[0], *clip], "six")
    big = b.node("Flatten", [b.node("GlobalAveragePool", [six], "pool")], "flat")
    keep = b.node("Flatten", [b.node("ReduceMean", [parts[1]], "kept", axes=[2, 3], keepdims=1)], "flat_kept")
    drop = b.node("ReduceMean", [parts[2]], "dropped", axes=[-1, -2], keepdims=0)
    b.node("Concat", [big, keep, drop], "y", axis=1)
    return b.model({"x": ["n", 3, 24, 32]}, {"y": ["n", 12]}, opset)


def hard_swish(last: str = "Conv") -> onnx.ModelProto:
    """x clip(x + 3, 0, 6) / 6, times 0.5, plus 0.25, and a padded layer of 4 channels behind it, or a Relu."""
    b = Builder()
    three, low, six = (b.constant(name, np.array(v)) for name, v in (("three", 3.0), ("low", 0.0), ("six", 6.0)))
    gate = b.node("Clip", [b.node("Add", ["x", three], "moved"), low, six], "gate")
    b.node("Div", [b.node("Mul", ["x", gate], "product"), six], "swish")
    b.node("Add", [b.constant("c", [0.25]), b.node("Mul", ["swish", b.constant("a", [0.5])], "scaled")], "shifted")
    weight = [] if last == "Relu" else [b.constant("w", b.random.normal(size=(4, 4, 3, 3)))]
    b.node(last, ["shifted", *weight], "y", **({"pads": [1] * 4} if weight else {}))
    return b.model({"x": [1, 4, 5, 5]}, {"y": [1, 4, 5, 5]})


def shared() -> onnx.ModelProto:
    """Convolutions with one weight, a bias that three nodes read, and a matrix that is read twice."""
    b = Builder()
    weight, bias = b.constant("w", b.random.normal(0, 0.3, (4, 4, 3, 3))), b.constant("b", b.random.normal(0, 1, 4))
    x = b.node("Conv", ["x", weight, bias], "one", pads=[1] * 4)
    x = b.node("Conv", [b.node("Relu", [x], "relu"), weight, bias], "two", pads=[1] * 4)
    flat = b.node("Flatten", [b.node("GlobalAveragePool", [x], "pool")], "flat")
    matrix = b.constant("m", b.random.normal(0, 0.5, (4, 4)))
    hidden = b.node("Gemm", [flat, matrix, bias], "gemm")
    b.node("MatMul", [hidden, matrix], "y")
    return b.model({"x": ["n", 4, 8, 8]}, {"y": ["n", 4]})


def clutter() -> onnx.ModelProto:
    """Identity, Dropout, Constants in nodes, a computed shape, a transposed weight, dead nodes, an output twice."""
    b = Builder()
    x = b.node("Dropout", [b.node("Identity", ["x"], "same")], "dropped")
    weight = numpy_helper.from_array(b.random.normal(0, 0.5, (6, 8)).astype(np.float32))
    weight = b.node("Transpose", [b.node("Constant", [], "stored", value=weight)], "turned", perm=[1, 0])
    hidden = b.node("MatMul", [x, weight], "hidden")
    shape = b.node("Shape", [hidden], "hidden_shape")
    rows = b.node("Mul", [b.node("Gather", [shape, b.integers("first", [0])], "rows"), b.integers("two", [2])], "twice")
    b.node("Reshape", [hidden, b.node("Concat", [rows, b.integers("three", [3])], "target", axis=0)], "y")
    b.node("Exp", [b.node("Neg", [hidden], "dead")], "deader")
    b.node("Identity", [hidden], "also")
    return b.model({"x": [4, 8]}, {"y": [8, 3], "hidden": [4, 6], "also": [4, 6]})


def branches(opset: int = 17) -> onnx.ModelProto:
    """If bodies that read a weight, a bias and a hidden tensor of the graph around them."""
    b = Builder()
    first = b.constant("w", b.random.normal(0, 0.5, (8, 8)))
    b.node("Identity", [b.node("MatMul", ["x", first], "product")], "hidden")
    condition = b.node(
        "Greater", [b.node("ReduceMean", ["x"], "mean", keepdims=0), b.constant("zero", np.array(0.0))], "yes"
    )
    bodies = {}
    for name, op_type in (("then_branch", "Add"), ("else_branch", "Sub")):
        again = helper.make_node("MatMul", ["hidden", "w"], [f"{name}_again"], name=f"{name}_matmul")
        last = helper.make_node(op_type, [f"{name}_again", "hidden"], [f"{name}_out"], name=f"{name}_last")
        out = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, ["n", 8])
        bodies[name] = helper.make_graph([again, last], name, [], [out])
    b.node("If", [condition], "chosen", **bodies)
    b.node("MatMul", ["chosen", first], "y")
    return b.model({"x": ["n", 8]}, {"y": ["n", 8]}, opset)


def legacy(opset: int = 8) -> onnx.ModelProto:
    """A convolution as in 2018: initializers are inputs too, Clip has attributes, nodes have no names."""
    b = Builder()
    x = b.node("Dropout", [b.conv("x", "a", (3, 16, 3))], "dropped", ratio=0.5)
    x = b.node("Clip", [x], "clipped", min=0.0, max=6.0)
    x = b.node("Flatten", [b.node("GlobalAveragePool", [x], "pool")], "flat")
    b.node(
        "Gemm", [x, b.constant("m", b.random.normal(0, 0.5, (16, 4))), b.constant("c", b.random.normal(0, 1, 4))], "y"
    )
    model = b.model({"x": ["n", 3, 8, 8]}, {"y": ["n", 4]}, opset)
    for initializer in model.graph.initializer:
        info = helper.make_tensor_value_info(initializer.name, initializer.data_type, list(initializer.dims))
        model.graph.input.append(info)
    for node in model.graph.node:
        node.name = ""
    model.ir_version = 3
    onnx.checker.check_model(model)
    return model


def half() -> onnx.ModelProto:
    """A float16 model: weights, inputs, outputs, a Constant, and a Cast to float32 and back."""
    b = Builder()
    scale = numpy_helper.from_array(np.array(0.5, np.float16))
    x = b.node("MatMul", ["x", b.constant("w", b.random.normal(0, 0.3, (8, 8)))], "hidden")
    x = b.node("Mul", [x, b.node("Constant", [], "scale", value=scale)], "scaled")
    x = b.node("Softmax", [b.node("Cast", [x], "up", to=TensorProto.FLOAT)], "soft")
    b.node("Cast", [x], "y", to=TensorProto.FLOAT16)
    b.initializers = [
        numpy_helper.from_array(numpy_helper.to_array(i).astype(np.float16), i.name) for i in b.initializers
    ]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["n", 8]) for name in ("x", "y")]
    graph = helper.make_graph(b.nodes, "g", infos[:1], infos[1:], b.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return onnx.shape_inference.infer_shapes(model)


ZOO = {
    "cnn": cnn, "cnn11": lambda: cnn(11), "mlp": mlp, "gelus": gelus, "gelus19": lambda: gelus(19),
    "layer_norms": layer_norms, "layer_norms18": lambda: layer_norms(18), "instance_norms": instance_norms,
    "l2_norms": l2_norms, "pools": pools, "pools11": lambda: pools(11), "shared": shared, "clutter": clutter,
    "branches": branches, "branches11": lambda: branches(11), "legacy": legacy, "half": half,
    "hard_swish": hard_swish,
}  # fmt: skip
"""Every model, for contracts."""


def feed(model: onnx.ModelProto, seed: int = 1, open_size: int = 3) -> dict[str, Array]:
    """Seeded noise for each input that is no initializer; open dimensions have `open_size`."""
    random = np.random.default_rng(seed)
    constants = {initializer.name for initializer in model.graph.initializer}
    sample = {}
    for value in model.graph.input:
        if value.name not in constants:
            kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            shape = [d.dim_value or open_size for d in value.type.tensor_type.shape.dim]
            sample[value.name] = random.normal(size=shape).astype(kind)
    return sample


def outputs(model: onnx.ModelProto | str, sample: dict[str, Array], optimise: bool = False) -> list[Array]:
    """Every output of a model in stock ONNX Runtime, without graph optimisation."""
    options = exact_options()
    options.intra_op_num_threads = 1
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = model if isinstance(model, str) else model.SerializeToString()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return [np.asarray(output) for output in session.run(None, sample)]
