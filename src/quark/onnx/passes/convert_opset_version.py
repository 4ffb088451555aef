"""Converts a model to another opset with the converter of onnx, which sees no weights.

That converter takes a ModelProto of at most 2 GB and loses external data: large weights stand in it as inputs, and are
attached again afterwards, unread.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import checker, helper, version_converter

from quark.errors import NotSupportedError, QuarkError
from quark.onnx.graph.edit import dims, insert, is_op, replace_output
from quark.onnx.graph.model_file import constant, infer_shapes, name_nodes, opset
from quark.onnx.graph.proto_file import reason
from quark.onnx.passes.same_outputs import require_same
from quark.onnx_ops.graph_writer import fixed_shape

_LARGEST_INSIDE = 1024
"""Bytes: the converter reads small constants such as axes and shapes."""


def convert_opset_version(model: ir.Model, target: int) -> int:
    """Convert a model to an opset; return 1, or 0 where it has it.

    Raises:
        QuarkError: An operator has no counterpart there.
        NotSupportedError: The model has local functions, which the converter drops.
        StructureError: The converted model computes something else.
    """
    source = opset(model)
    if source == target:
        return 0
    if model.functions:
        names = ", ".join(function.name for function in model.functions.values())
        raise NotSupportedError(f"A model with local functions ({names}) cannot be converted to another opset.")
    weights = {
        name: v
        for name, v in model.graph.initializers.items()
        if v.const_value is not None and v.const_value.nbytes > _LARGEST_INSIDE
    }
    converted = _convert(_without(model, weights), source, target)
    fresh = ir.from_proto(converted)
    _attach(fresh.graph, weights)
    fresh.ir_version = max(model.ir_version, helper.find_min_ir_version_for(converted.opset_import, True))
    name_nodes(fresh)
    infer_shapes(fresh)
    _keep_meaning(fresh, source, target)
    require_same(model, fresh, f"The model has opset {source} and cannot be converted to {target}")
    model.graph, model.ir_version = fresh.graph, fresh.ir_version
    return 1


def _keep_meaning(model: ir.Model, source: int, target: int) -> None:
    """Say in attributes, in every body, what operators meant before; the converter leaves it to new defaults."""
    for node in list(model.graph.all_nodes()):
        if is_op(node, "Resize") and source < 11 <= target:
            node.attributes["coordinate_transformation_mode"] = ir.AttrString(
                "coordinate_transformation_mode", "asymmetric"
            )
            if node.attributes.get_string("mode", "nearest") == "nearest":
                # How a Resize of opset 10 finds the nearest: up where it makes smaller, else down.
                scales = constant(node.inputs[2]) if len(node.inputs) > 2 else None
                rounding = "ceil" if scales is not None and (scales < 1).any() else "floor"
                node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", rounding)
        elif is_op(node, "Hardmax") and source < 13 <= target:
            _flatten(node)


def _flatten(node: ir.Node) -> None:
    """Put a Hardmax, which meant all axes from its own on, between a Flatten and a Reshape back."""
    value, shape = node.inputs[0], dims(node.inputs[0])
    axis = node.attributes.get_int("axis", 1)
    node.attributes["axis"] = ir.AttrInt64("axis", -1)
    if value is None or (shape is not None and axis in (-1, len(shape) - 1)):
        return
    sizes = insert(node, "Shape", [value], {}, f"{node.name}_shape")
    node.replace_input_with(0, insert(node, "Flatten", [value], {"axis": axis}, f"{node.name}_flat"))
    graph, result = node.graph, node.outputs[0]
    assert graph is not None
    back = ir.node("Reshape", [result, sizes], name=f"{node.name}_back")
    graph.insert_after(node, [back])
    output, name = back.outputs[0], result.name
    output.type, output.shape = result.type, result.shape
    result.name, result.shape, output.name = f"{node.name}_codes", None, name
    for use in [use for use in result.uses() if use.node is not back]:
        use.node.replace_input_with(use.idx, output)
    replace_output(graph, result, output)


def _without(model: ir.Model, weights: dict[str, ir.Value]) -> onnx.ModelProto:
    """The model with inputs in the place of the weights."""
    bare = model.clone()
    # Before version 4 every initializer is an input too, which runtimes do not ask for and the converter does.
    bare.ir_version = max(bare.ir_version or 0, 4)
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
            f"The model has opset {source} and cannot be converted to {target}: {reason(error)}"
        ) from error


def _attach(graph: ir.Graph, weights: dict[str, ir.Value]) -> None:
    """Turn the inputs that stand for weights into initializers; those that were inputs too stay inputs."""
    inputs = {value.name: value for value in graph.inputs}
    for name, weight in weights.items():
        inputs[name].const_value = weight.const_value
        graph.register_initializer(inputs[name])
        if not weight.is_graph_input():
            graph.inputs.remove(inputs[name])
