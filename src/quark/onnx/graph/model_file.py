"""Loading and checking of ONNX models; onnx_ir inside, weights memory-mapped until they are needed."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx_ir.passes.common import ShapeInferencePass

from quark.errors import ConfigError, FormatError, one_line
from quark.onnx.graph.check import check_graph, check_weights, sort_nodes
from quark.onnx_ops.graph_writer import free_name
from quark.onnx_ops.saving import PROTOBUF_LIMIT, SMALL, files_read, weight_bytes

QUANTIZED_OPS = {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"}
QUANTIZED_OPS |= {"QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul", "MatMulNBits"}
QUANTIZED_OPS |= {"ExtendedQuantizeLinear", "ExtendedDequantizeLinear", "MXQuantizeDequantize", "BFPQuantizeDequantize"}
PLAIN = {ir.DataType[name] for name in ("FLOAT", "FLOAT16", "DOUBLE", "INT64", "INT32", "INT16", "INT8", "UINT8")}
"""The element types that numpy has itself."""
CONSTANT_KINDS = {"value_float": "float32", "value_floats": "float32", "value_int": "int64", "value_ints": "int64"}
MAKES_SEQUENCE = ("SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SplitToSequence")


def load(source: str | os.PathLike[str] | onnx.ModelProto) -> ir.Model:
    """Read a model from a path or a ModelProto, which is not changed; every node gets a name.

    Raises:
        FormatError: No ONNX file, truncated, without opset, operators or outputs, of an opset that does not exist yet,
            with two nodes of one name, or with external data that is missing or lies outside the folder of the model.
        ConfigError: The model is quantized already.
    """
    model = read(source)
    refuse_quantized(model)
    return model


def refuse_quantized(model: ir.Model) -> None:
    """Raise ConfigError for a model that is quantized already."""
    for node in model.graph.all_nodes():
        if node.op_type in QUANTIZED_OPS:
            raise ConfigError(f"The model is quantized already: it holds {node.op_type} ({node.name}).")


def read(source: str | os.PathLike[str] | onnx.ModelProto) -> ir.Model:
    """The same for a model that may be quantized."""
    if not isinstance(source, (str, os.PathLike, onnx.ModelProto)):
        raise FormatError(f"A model is a path or a ModelProto, got {type(source).__name__}.")
    with _quiet():
        model = ir.from_proto(source) if isinstance(source, onnx.ModelProto) else _load_file(Path(source))
    name = "The ModelProto" if isinstance(source, onnx.ModelProto) else os.fspath(source)
    check_graph(model, name)
    sort_nodes(model, name)
    check_weights(model, name)
    name_nodes(model)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """What onnx_ir logs about a damaged model is said once, by the error; an inference that fails changes nothing."""
    library = logging.getLogger("onnx_ir")
    level = library.level
    library.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        library.setLevel(level)


def _load_file(path: Path) -> ir.Model:
    if not path.is_file():
        raise FormatError(f"{path} is not a file.")
    try:
        proto, arrays = _lighten(onnx.load(path, load_external_data=False))
        model = ir.from_proto(proto)
        ir.external_data.set_base_dir(model.graph, path.parent)
    except (DecodeError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise FormatError(f"{path} is not an ONNX model, or truncated: {error}.") from None
    for name, array in arrays.items():
        model.graph.initializers[name].const_value = ir.Tensor(array, name=name)
    return model


def _lighten(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The model without its large weights, and these as arrays: in a message they would be copied at each reading.

    The model is another message, as a message never gives memory back.
    """
    arrays = {}
    kinds = {int(kind): kind.numpy() for kind in PLAIN}
    for tensor in proto.graph.initializer:
        if tensor.data_type in kinds and tensor.HasField("raw_data") and math.prod(tensor.dims) >= SMALL:
            kind = kinds[tensor.data_type]
            arrays[tensor.name] = np.frombuffer(tensor.raw_data, kind).reshape(tensor.dims)
            tensor.ClearField("raw_data")
    light = onnx.ModelProto()
    light.CopyFrom(proto)
    return light, arrays


def name_nodes(model: ir.Model) -> None:
    """Give every node without a name one that is free."""
    used = {node.name for node in model.graph.all_nodes() if node.name}
    for index, node in enumerate(model.graph.all_nodes()):
        if not node.name:
            node.name = free_name(f"{node.op_type}_{index}", used)
            used.add(node.name)


def infer_shapes(model: ir.Model) -> None:
    """Fill in the types and shapes that follow from the inputs; values with unknown ones stay as they are."""
    with _quiet():
        ShapeInferencePass(check_type=False, strict_mode=False)(model)
    for node in model.graph.all_nodes():
        # The pass takes a sequence for a tensor of its elements.
        for value in node.outputs if node.op_type in MAKES_SEQUENCE else ():
            if isinstance(value.type, ir.TensorType):
                value.type, value.shape = ir.SequenceType(value.type), None


def opset(model: ir.Model) -> int:
    """Version of the ai.onnx operators."""
    return int(model.opset_imports.get("", 0))


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """The model as a ModelProto, weights inside."""
    return ir.to_proto(model)


def split_weights(model: ir.Model) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The model as a ModelProto that names its weights as external, and their arrays by name.

    For `SessionOptions.add_external_initializers`: the runtime then reads the arrays where they are, be it a mapped
    file, and nothing is copied, nor limited to 2 GB.
    """
    values = {
        name: value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
        # The runtime drops what nothing reads, and then misses it.
        and value.uses()
        and value.const_value.dtype in PLAIN
        and (value.const_value.nbytes >= SMALL or isinstance(value.const_value, ir.ExternalTensor))
    }
    tensors = {name: value.const_value for name, value in values.items()}
    try:
        for name, value in values.items():
            tensor = tensors[name]
            assert tensor is not None
            value.const_value = ir.ExternalTensor(
                "memory", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name
            )
        proto = to_proto(model)
    finally:
        for name, value in values.items():
            value.const_value = tensors[name]
    return proto, {
        name: np.asarray(tensor.numpy(), order="C") for name, tensor in tensors.items() if tensor is not None
    }


def checked_proto(model: ir.Model) -> onnx.ModelProto:
    """The same, accepted by onnx.checker; one over 2 GB, or with weights outside, it cannot see.

    Raises:
        FormatError: The model is not valid.
    """
    proto = to_proto(model)
    if weight_bytes(model) < PROTOBUF_LIMIT and not files_read(model):
        try:
            onnx.checker.check_model(proto)
        except onnx.checker.ValidationError as error:
            raise FormatError(f"The result is no valid ONNX model: {one_line(error)}") from error
    return proto


def is_constant(value: ir.Value | None) -> bool:
    """Whether `constant` gives an array, without reading it."""
    if value is None or value.is_graph_input():
        return False
    node = value.producer()
    if node is None or value.const_value is not None:
        return value.const_value is not None
    return node.op_type == "Constant" and set(node.attributes) <= {"value", *CONSTANT_KINDS}


def constant(value: ir.Value | None) -> Any:
    """The numpy array of an initializer or a Constant node's output, or None.

    An initializer that is an input too is only a default, which a run may overrule.
    """
    if value is None or not is_constant(value):
        return None
    if value.const_value is not None:
        return value.const_value.numpy()
    node = value.producer()
    assert node is not None
    ((name, attribute),) = node.attributes.items()
    return attribute.as_tensor().numpy() if name == "value" else np.array(attribute.value, CONSTANT_KINDS[name])
