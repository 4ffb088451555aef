"""Changes the floating point type of a whole model: float16 to float32, float32 to float16 or bfloat16.

Weights, constants, Casts, inputs, outputs and the bodies of If and Loop follow. Towards float16, finite values beyond
65504 become that, as masks of -3.4e38 must stay finite.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.edit import insert, is_op, prune, replace_output
from quark.onnx.graph.model_file import opset
from quark.onnx_ops.graph_writer import fixed_shape, redirect

_FLOAT32_INPUTS = {"Resize": (2,), "Upsample": (1,), "NonMaxSuppression": (0, 1, 3, 4)}
"""Op type -> inputs that ONNX has in float32 only."""
_SCALES_WERE_SECOND = 11
"""The first opset whose Resize has its scales after another input."""


KEEP_IO_TYPES = "keep_io_types"
"""Argument of `convert_fp16_to_fp32`: inputs and outputs stay float16, after and before a Cast."""


def convert_fp16_to_fp32(model: ir.Model, mode: str = "") -> int:
    """Turn every float16 tensor into float32; return how many there were. The same numbers are then exact."""
    ends = [value for value in (*model.graph.inputs, *model.graph.outputs) if value.dtype == ir.DataType.FLOAT16]
    count = _convert(model, ir.DataType.FLOAT16, ir.DataType.FLOAT)
    if mode == KEEP_IO_TYPES:
        _keep_types(model.graph, ends, ir.DataType.FLOAT16)
    return count


def convert_fp32_to_fp16(model: ir.Model, keep_io_types: bool = False) -> int:
    """Turn float32 tensors into float16; inputs and outputs too, unless they are kept by a Cast."""
    return _to_half(model, ir.DataType.FLOAT16, keep_io_types)


def convert_fp32_to_bf16(model: ir.Model) -> int:
    """Turn float32 tensors into bfloat16, inputs and outputs included."""
    return _to_half(model, ir.DataType.BFLOAT16, False)


def _to_half(model: ir.Model, target: ir.DataType, keep_io_types: bool) -> int:
    graph = model.graph
    ends = [value for value in (*graph.inputs, *graph.outputs) if value.dtype == ir.DataType.FLOAT]
    float32_inputs = _float32_inputs(model)
    unchanged = {
        value
        for value in float32_inputs.values()
        if value.is_initializer() and {(use.node, use.idx) for use in value.uses()} <= float32_inputs.keys()
    }
    count = _convert(model, ir.DataType.FLOAT, target, unchanged)
    if not count:
        return 0
    to_float = {"to": int(ir.DataType.FLOAT)}
    for node, index in float32_inputs:
        value = node.inputs[index]
        if value is not None and value.dtype != ir.DataType.FLOAT:
            node.replace_input_with(index, insert(node, "Cast", [value], to_float, f"{node.name}_input_{index}_float"))
    if keep_io_types:
        _keep_types(graph, ends, ir.DataType.FLOAT)
    return count


def _keep_types(graph: ir.Graph, ends: Collection[ir.Value], kind: ir.DataType) -> None:
    """Give inputs and outputs of the model the type back that they had."""
    for value in ends:
        if value.is_graph_input():
            _keep_input_type(graph, value, kind)
        else:
            _keep_output_type(graph, value, kind)


def _float32_inputs(model: ir.Model) -> dict[tuple[ir.Node, int], ir.Value]:
    """The inputs, of nodes of any body, that must stay float32."""
    inputs = _FLOAT32_INPUTS | ({"Resize": (1,)} if opset(model) < _SCALES_WERE_SECOND else {})
    return {
        (node, index): value
        for node in model.graph.all_nodes()
        if is_op(node, *inputs)
        for index, value in enumerate(node.inputs)
        if value is not None and index in inputs[node.op_type]
    }


def _convert(model: ir.Model, source: ir.DataType, target: ir.DataType, unchanged: Collection[ir.Value] = ()) -> int:
    """Give every value of a type another, but for `unchanged`; return how many there were."""
    count = 0
    for value in _values(model):
        if value.dtype != source or value in unchanged:
            continue
        value.type = _type_of(value.type, target)
        if value.const_value is not None:
            value.const_value = _cast(value.const_value, target)
        count += 1
    for graph in (*model.graphs(), *model.functions.values()):
        for node in list(graph):
            _convert_attributes(node, source, target)
            # A Cast to the type that its input has goes.
            given = node.inputs[0] if is_op(node, "Cast") else None
            if given is None or given.dtype is None or node.attributes["to"].as_int() != int(given.dtype):
                continue
            if redirect(node.outputs[0], given):
                prune(node)
    return count


def _type_of(kind: ir.TypeProtocol | None, target: ir.DataType) -> ir.TypeProtocol:
    """A type of another element type: a sequence stays one."""
    if isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        return type(kind)(_type_of(kind.elem_type, target))
    return ir.TensorType(target)


def _values(model: ir.Model) -> Iterator[ir.Value]:
    """Every value of every body, once."""
    for graph in model.graphs():
        yield from graph.inputs
        yield from (value for value in graph.initializers.values() if not value.is_graph_input())
        for node in graph:
            yield from node.outputs


def _convert_attributes(node: ir.Node, source: ir.DataType, target: ir.DataType) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == source:
            node.attributes[name] = ir.AttrTensor(name, _cast(attribute.as_tensor(), target))
        elif name in ("to", "dtype") and attribute.value == int(source):
            node.attributes[name] = ir.AttrInt64(name, int(target))
        elif name in ("value_float", "value_floats") and source == ir.DataType.FLOAT:
            del node.attributes[name]
            tensor = ir.tensor(np.asarray(attribute.value, np.float32))
            node.attributes["value"] = ir.AttrTensor("value", _cast(tensor, target))


def _cast(tensor: ir.TensorProtocol, target: ir.DataType) -> ir.TensorProtocol:
    """A tensor of another type, computed when it is read."""

    def compute() -> ir.TensorProtocol:
        array: np.ndarray[Any, Any] = tensor.numpy()
        if target == ir.DataType.FLOAT16:
            largest = np.finfo(np.float16).max
            array = np.where(np.isfinite(array), np.clip(array, -largest, largest), array)
        return ir.tensor(array.astype(target.numpy()), name=tensor.name)

    return ir.LazyTensor(compute, dtype=target, shape=fixed_shape(tensor), name=tensor.name)


def _keep_input_type(graph: ir.Graph, value: ir.Value, kind: ir.DataType) -> None:
    """Give an input of the model its type back: after it stands a Cast to the type that its readers take."""
    inner, readers = value.dtype, list(value.uses())
    assert inner is not None
    cast = ir.node("Cast", [value], {"to": int(inner)}, name=f"{value.name}_cast")
    graph.insert_before(graph[0], [cast])
    result = cast.outputs[0]
    result.name, result.type, result.shape = f"{value.name}_low", ir.TensorType(inner), value.shape
    value.type = ir.TensorType(kind)
    for use in readers:
        use.node.replace_input_with(use.idx, result)


def _keep_output_type(graph: ir.Graph, value: ir.Value, kind: ir.DataType) -> None:
    """Give an output of the model its type back: before it stands a Cast, whose output takes its name."""
    name = value.name
    cast = ir.node("Cast", [value], {"to": int(kind)}, name=f"{name}_cast")
    graph.append(cast)
    result = cast.outputs[0]
    value.name = f"{name}_low"
    result.name, result.type, result.shape = name, ir.TensorType(kind), value.shape
    replace_output(graph, value, result)
