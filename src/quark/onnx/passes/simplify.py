"""Removes what a runtime would remove: constants in nodes, computed constants, Identity, Dropout, dead nodes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper
from onnx.reference import ReferenceEvaluator

from quark.onnx.graph.edit import KNOWN_DOMAINS, dims, is_op, is_read, prune, remove_unused
from quark.onnx.graph.model_file import constant, is_constant, is_quantized
from quark.onnx.graph.sessions import open_session
from quark.onnx.operators import HOLDERS
from quark.onnx.passes.slim import slim
from quark.onnx_ops.graph_writer import add_constant, redirect

MOVES = ("Cast", "Concat", "Expand", "Gather", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze")
COMPUTES = ("Add", "ConstantOfShape", "Div", "Equal", "Floor", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Range")
NORMS = ("Abs", "Exp", "Log", "MatMul", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin",
         "ReduceSum", "ReduceSumSquare", "Sigmoid", "Sign", "Softplus", "Tanh")  # fmt: skip
"""Op types by which graphs compute weights from constants: a norm and a direction (weight norm), a mean, a mask."""
FOLDED = (
    *MOVES,
    *COMPUTES,
    *NORMS,
    "ReduceProd",
    "Sub",
    "Where",
    "And",
    "Or",
    "Less",
    "Greater",
    "Ceil",
    "Sqrt",
    "Pow",
)
"""Op types that the reference evaluator computes where all inputs are constant: arithmetic of shapes, and weights.

Any other is computed by the runtime, which takes longer to begin, where the size of the result is known before.
"""
_STAYS = (*HOLDERS, "Bernoulli", "Multinomial")
"""Op types that are not computed: what holds bodies, and, with all that begins with Random, what draws."""

OPEN = np.iinfo(np.int64).min
"""Stands for a dimension that is not fixed."""

_LARGEST_GROWTH = 1024
"""Elements: a result over this is kept only if it is no larger than its inputs."""


def simplify(model: ir.Model, options: Mapping[str, Any] | None = None) -> int:
    """Simplify the graph, not the bodies of If and Loop; return how many nodes are gone.

    Args:
        model: The model, changed in place.
        options: Keywords of `onnxslim.slim`, which then goes first; None: not at all. See `slim`.
    """
    before = len(model.graph)
    if options is not None:
        slim(model, options)
    for node in list(model.graph):
        if is_op(node, "Constant"):
            _become(node, [constant(node.outputs[0])])
        elif is_op(node, "Identity", "Dropout"):
            _bypass(node)
        else:
            _fold(model, node)
    remove_unused(model)
    return before - len(model.graph)


def _become(node: ir.Node, arrays: list[Any]) -> None:
    """Put initializers in the place of a node; not for None, and not where one is an output of the model."""
    graph = node.graph
    if graph is None or any(array is None for array in arrays) or any(out.is_graph_output() for out in node.outputs):
        return
    for output, array in zip(node.outputs, arrays, strict=True):
        name, output.name = output.name or "", None
        if output.uses():
            output.replace_all_uses_with(add_constant(graph, name, array))
    prune(node)


def _bypass(node: ir.Node) -> None:
    """Drop an Identity, or a Dropout, which is one outside training."""
    source = node.inputs[0]
    trains = len(node.inputs) > 2 and node.inputs[2] is not None and constant(node.inputs[2]) != np.False_
    if source is None or trains or any(is_read(mask) for mask in node.outputs[1:]):
        return
    if redirect(node.outputs[0], source):
        prune(node)


def join_constants(model: ir.Model) -> None:
    """Compute each Concat of constants, and what then has none but constants: it is as large as its parts together.

    So PyTorch writes an LSTM, whose gates ONNX has in another order. Where its weights stay in float a file may
    grow by that, as other bodies may read the parts, too.
    """
    for node in list(model.graph):
        if node.graph is not None:
            _fold(model, node, joins=is_op(node, "Concat"))
    remove_unused(model)


def _fold(model: ir.Model, node: ir.Node, joins: bool = False) -> None:
    """Compute a node of constants, or of fixed dimensions of a shape; `joins`: a result as large as all inputs."""
    results: list[Any] = [None]
    if is_op(node, "Shape"):
        results = [_shape(node)]
    elif node.inputs and all(value is None or _is_known(value, node) for value in node.inputs):
        inputs = {value.name or "": _known(value) for value in node.inputs if value is not None}
        if is_op(node, *FOLDED) and inputs:
            results = [_evaluate(model, node, inputs, joins)]
        elif _runs_alone(node, inputs):
            results = _run(model, node, inputs)
    if not any(np.any(result == OPEN) for result in results):
        _become(node, results)


def _is_known(value: ir.Value, reader: ir.Node) -> bool:
    """Return True for a constant, and a shape of which the reader picks dimensions: as its data, never as an index."""
    picks = is_op(reader, "Gather", "Slice") and is_op(value.producer(), "Shape") and reader.inputs.index(value) == 0
    return is_constant(value) or (picks and reader.inputs.count(value) == 1 and _known(value) is not None)


def _known(value: ir.Value) -> Any:
    """The array of a constant, or of a shape whose open dimensions are OPEN."""
    node = value.producer()
    return _shape(node) if node is not None and is_op(node, "Shape") else constant(value)


def _shape(node: ir.Node) -> Any:
    """Return the output of a Shape, OPEN for open dimensions; None where the rank is unknown."""
    shape = dims(node.inputs[0])
    if shape is None:
        return None
    part = shape[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(shape))]
    return np.array([OPEN if size is None else size for size in part], np.int64)


def _evaluate(model: ir.Model, node: ir.Node, inputs: dict[str, Any], joins: bool = False) -> Any:
    """The output of a node of constants by the reference evaluator of onnx; None where it is large or fails."""
    sizes = [array.size for array in inputs.values()]
    largest = max(_LARGEST_GROWTH, sum(sizes) if joins else max(sizes))
    if _result_size(node, [inputs[value.name or ""] for value in node.inputs if value is not None]) > largest:
        return None
    single = _as_model(model, node, inputs)
    try:
        output = np.asarray(next(iter(ReferenceEvaluator(single).run(None, inputs))))
    except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, NotImplementedError, MemoryError):
        return None  # The evaluator lacks a type or a form of the op: the node stays, for the runtime to compute.
    return output if output.size <= largest else None


def _as_model(model: ir.Model, node: ir.Node, inputs: dict[str, Any]) -> onnx.ModelProto:
    """A model of one node, whose inputs are arrays."""
    proto = ir.to_proto(node)
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    results = [helper.make_empty_tensor_value_info(name) for name in proto.output if name]
    opsets = [helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    graph = helper.make_graph([proto], "constant", infos, results)
    return helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)


def _runs_alone(node: ir.Node, inputs: dict[str, Any]) -> bool:
    """Return True where the runtime is to compute a node: of constants alone, with results no larger than these."""
    stays = node.op_type in _STAYS or node.op_type.startswith("Random") or is_quantized(node)
    if stays or node.domain not in KNOWN_DOMAINS or not inputs:
        return False
    most = max(_LARGEST_GROWTH, sum(array.size for array in inputs.values()))
    texts = any(array.dtype == object for array in inputs.values())
    return not texts and sum(map(_elements, node.outputs)) <= most


def _elements(value: ir.Value) -> float:
    """How many elements a tensor has; infinity where its shape is open."""
    shape = dims(value)
    if shape is None or None in shape:
        return math.inf
    return math.prod(size or 0 for size in shape)


def _run(model: ir.Model, node: ir.Node, inputs: dict[str, Any]) -> list[Any]:
    """Return the outputs of a node of constants as ONNX Runtime computes them, each None where it does not."""
    names = [value.name or "" for value in node.outputs]
    try:
        found = dict(
            zip(filter(None, names), open_session(_as_model(model, node, inputs)).run(None, inputs), strict=True)
        )
    except Exception:  # noqa: BLE001 - it lacks a kernel, or fails: the node stays
        return [None]
    return [found.get(name, ()) for name in names]


def _result_size(node: ir.Node, arrays: list[Any]) -> int:
    """Elements of what a node that can grow will give, before it takes the memory; 0 for others."""
    for op_type, (inputs, size) in _GROWS.items():
        if is_op(node, op_type) and len(arrays) >= inputs:
            return size(*arrays[:inputs])
    if is_op(node, *MOVES):
        return 0
    return _broadcast_size(*arrays)


def _broadcast_size(*arrays: Any) -> int:
    sizes = [array.shape[::-1] for array in arrays]
    return math.prod(max(column) for column in zip_longest(*sizes, fillvalue=1))


def _range_size(*limits: Any) -> int:
    if any(limit.size != 1 for limit in limits):
        return _broadcast_size(*limits)
    start, end, step = (limit.item() for limit in limits)
    steps = (end - start) / step if step else math.inf
    return int(steps) if math.isfinite(steps) else sys.maxsize


_GROWS: dict[str, tuple[int, Callable[..., int]]] = {
    "ConstantOfShape": (1, lambda shape: math.prod(shape.reshape(-1).tolist())),
    "Tile": (2, lambda x, repeats: math.prod([x.size, *repeats.reshape(-1).tolist()])),
    "Expand": (2, lambda x, shape: math.prod(max(1, size) for size in shape.reshape(-1).tolist())),
    "Range": (3, _range_size),
}
"""Op type whose output is larger than its inputs -> how many of these say, and how large."""
