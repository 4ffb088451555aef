"""Small ONNX models with seeded random weights, and readers for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

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


def run(model: onnx.ModelProto | str, feed: dict[str, Array], optimise: bool = True) -> Array:
    """First output of a model in stock ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = model if isinstance(model, str) else model.SerializeToString()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feed)[0])
