"""Converts a model to another opset with the converter of onnx, which sees no weights.

That converter takes a ModelProto of at most 2 GB and loses external data: large weights stand in it as inputs, and are
attached again afterwards, unread.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import checker, helper, version_converter

from quark.errors import NotSupportedError, QuarkError
from quark.onnx.graph.model_file import infer_shapes, name_nodes, opset
from quark.onnx.graph.proto_file import reason
from quark.onnx_ops.graph_writer import fixed_shape

LARGEST_INSIDE = 1024
"""Bytes: the converter reads small constants such as axes and shapes."""


def convert_opset_version(model: ir.Model, target: int) -> int:
    """Convert a model to an opset; return 1, or 0 where it has it.

    Raises:
        QuarkError: An operator has no counterpart there.
        NotSupportedError: The model has local functions, which the converter drops.
    """
    source = opset(model)
    if source == target:
        return 0
    if model.functions:
        names = ", ".join(function.name for function in model.functions.values())
        raise NotSupportedError(f"A model with local functions ({names}) cannot be converted to another opset.")
    weights = {name: v for name, v in model.graph.initializers.items() if _is_large(v)}
    converted = _convert(_without(model, weights), source, target)
    fresh = ir.from_proto(converted).graph
    _attach(fresh, weights)
    model.graph = fresh
    model.ir_version = max(model.ir_version, helper.find_min_ir_version_for(converted.opset_import, True))
    name_nodes(model)
    infer_shapes(model)
    return 1


def _is_large(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.nbytes > LARGEST_INSIDE


def _without(model: ir.Model, weights: dict[str, ir.Value]) -> onnx.ModelProto:
    """The model with inputs in the place of the weights."""
    bare = model.clone()
    for value in bare.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor) and value.name not in weights:
            value.const_value = ir.tensor(value.const_value.numpy().copy(), name=value.name)
    for name, weight in weights.items():
        value = bare.graph.initializers.pop(name)
        assert weight.const_value is not None
        value.const_value = None
        value.type, value.shape = ir.TensorType(weight.const_value.dtype), fixed_shape(weight.const_value)
        if value not in bare.graph.inputs:
            bare.graph.inputs.append(value)
    return ir.to_proto(bare)


def _convert(proto: onnx.ModelProto, source: int, target: int) -> onnx.ModelProto:
    try:
        converted = version_converter.convert_version(proto, target)
        checker.check_model(converted)
        return converted
    except Exception as error:  # the converter's own classes have no base but this one
        raise QuarkError(
            f"The model is of opset {source} and cannot be converted to {target}: {reason(error)}"
        ) from error


def _attach(graph: ir.Graph, weights: dict[str, ir.Value]) -> None:
    """Turn the inputs that stand for weights into initializers; those that were inputs too stay inputs."""
    inputs = {value.name: value for value in graph.inputs}
    for name, weight in weights.items():
        inputs[name].const_value = weight.const_value
        graph.register_initializer(inputs[name])
        if not weight.is_graph_input():
            graph.inputs.remove(inputs[name])
