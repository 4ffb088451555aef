"""Models whose nodes hold bodies: If, Loop and Scan, around a whole model or around a few nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.models.onnx_zoo import Array, Builder

BODIES = ("then_branch", "else_branch")


def flag(name: str = "yes") -> onnx.ValueInfoProto:
    """An input that says which branch runs."""
    return helper.make_tensor_value_info(name, TensorProto.BOOL, [])


def identity_if(b: Builder, value: str, output: str, rank: int = 2) -> None:
    """An If over the mean of x whose branches give a tensor as it is."""
    b.node("Greater", [b.node("ReduceMean", ["x"], "mean", keepdims=0), b.constant("zero", np.array(0.0))], "yes")
    bodies = {}
    for name in BODIES:
        node = helper.make_node("Identity", [value], [f"{name}_out"], name=f"{name}_node")
        out = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, [None] * rank)
        bodies[name] = helper.make_graph([node], name, [], [out])
    b.node("If", ["yes"], output, **bodies)


def renamed(graph: onnx.GraphProto, prefix: str, keep: tuple[str, ...] = ("x",)) -> onnx.GraphProto:
    """A graph without inputs whose tensors and nodes have a prefix, but for those that it reads of what is around."""
    copy = onnx.GraphProto()
    copy.CopyFrom(graph)
    del copy.input[:]
    for node in copy.node:
        node.name = prefix + node.name
        for names in (node.input, node.output):
            names[:] = [name if name in keep or not name else prefix + name for name in names]
    for entry in (*copy.output, *copy.value_info, *copy.initializer):
        entry.name = prefix + entry.name
    return copy


def in_branches(flat: onnx.ModelProto, levels: int = 1) -> onnx.ModelProto:
    """A model that is one If, each branch a whole copy of a model; with more levels, within another If."""
    graph = flat.graph
    branches = {name: renamed(graph, f"{name}_") for name in BODIES}
    node = helper.make_node("If", ["yes"], [graph.output[0].name], name="choice", **branches)
    for level in range(1, levels):
        out = onnx.ValueInfoProto()
        out.CopyFrom(graph.output[0])
        out.name = f"{out.name}_{level}"
        node.output[0] = out.name
        other = helper.make_node("Identity", [f"other_{level}"], [f"passed_{level}"], name=f"pass_{level}")
        zero = helper.make_node("ConstantOfShape", [f"shape_{level}"], [f"other_{level}"], name=f"zero_{level}")
        shape = numpy_helper.from_array(np.array([1, 1], np.int64), f"shape_{level}")
        passed = helper.make_tensor_value_info(f"passed_{level}", TensorProto.FLOAT, [None, None])
        inner = helper.make_graph([node], f"then_{level}", [], [out])
        outer = helper.make_graph([zero, other], f"else_{level}", [], [passed], [shape])
        node = helper.make_node(
            "If", ["outer"], [graph.output[0].name], name=f"outer_{level}", then_branch=inner, else_branch=outer
        )
    inputs = [graph.input[0], flag(), *([flag("outer")] if levels > 1 else [])]
    whole = helper.make_graph([node], "g", inputs, [graph.output[0]])
    model = helper.make_model(whole, opset_imports=flat.opset_import, ir_version=flat.ir_version)
    onnx.checker.check_model(model)
    return model


def sums(op_type: str) -> onnx.ModelProto:
    """s <- tanh(s + e) @ w over the rows e of x, as a Loop or as a Scan backwards; gives each s that was read."""
    b = Builder()
    b.constant("w", b.random.normal(0, 0.7, (4, 4)))
    b.constant("zero", np.zeros(4))
    info = helper.make_tensor_value_info
    state, row = info("s", TensorProto.FLOAT, [4]), info("e", TensorProto.FLOAT, [4])
    steps = [
        helper.make_node("Identity", ["s"], ["read"], name="seen"),
        helper.make_node("Add", ["s", "e"], ["t"], name="add"),
        helper.make_node("Tanh", ["t"], ["u"], name="tanh"),
        helper.make_node("MatMul", ["u", "w"], ["next"], name="product"),
    ]
    outs = [info("next", TensorProto.FLOAT, [4]), info("read", TensorProto.FLOAT, [4])]
    attributes: dict[str, Any] = {}
    if op_type == "Loop":
        steps = [
            helper.make_node("Identity", ["c"], ["go_on"], name="on"),
            helper.make_node("Gather", ["x", "i"], ["e"], name="pick"),
            *steps,
        ]
        ins = [info("i", TensorProto.INT64, []), info("c", TensorProto.BOOL, []), state]
        outs = [info("go_on", TensorProto.BOOL, []), *outs]
        size = b.node("Shape", ["x"], "size", end=1)
        inputs = [b.node("Squeeze", [size], "trips"), "", "zero"]
    else:
        ins, inputs = [state, row], ["zero", b.node("Transpose", ["x"], "turned", perm=[1, 0])]
        attributes = {"num_scan_inputs": 1, "scan_input_axes": [1], "scan_input_directions": [1]}
    body = helper.make_graph(steps, "body", ins, outs)
    b.nodes.append(helper.make_node(op_type, inputs, ["last", "all"], name="steps", body=body, **attributes))
    return b.model({"x": ["n", 4]}, {"all": ["n", 4], "last": [4]})


def rows(count: int = 4, size: int = 6) -> list[dict[str, Array]]:
    """Feeds for `sums`."""
    random = np.random.default_rng(3)
    return [{"x": random.normal(size=(size, 4)).astype(np.float32)} for _ in range(count)]
