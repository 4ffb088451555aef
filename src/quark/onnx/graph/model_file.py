"""Loading and checking of ONNX models; onnx_ir inside, weights memory-mapped until they are needed."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from quark.errors import ConfigError, FormatError, NotSupportedError
from quark.onnx.graph.check_proto import bodies_of, fill_in, has_parts
from quark.onnx.graph.check_tensors import LinkedTensor, quoted
from quark.onnx.graph.proto_file import PLAIN, check_message, read_light, reason
from quark.onnx.graph.sessions import require_loads
from quark.onnx_ops.graph_writer import free_name
from quark.onnx_ops.saving import PROTOBUF_LIMIT, SMALL, check_valid, files_read, named_as_external, weight_bytes

_QUANTIZED_OPS = {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"}
_QUANTIZED_OPS |= {"QuantizeLinear", "DequantizeLinear", "MatMulNBits"}
_QUANTIZED_OPS |= {"DynamicQuantizeLSTM", "GatherBlockQuantized", "DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
_QUANTIZED_OPS |= {"QGemm", "QAttention", "QEmbedLayerNormalization", "QMoE", "MatMulBnb4"}
EXTENDED_OPS = {"ExtendedQuantizeLinear", "ExtendedDequantizeLinear", "MXQuantizeDequantize", "BFPQuantizeDequantize"}
_QUANTIZED_OPS |= EXTENDED_OPS
_MAKES_NO_TENSOR = re.compile("Sequence|Optional")
"""In the names of op types whose outputs may be sequences or optionals."""
CONSTANT_KINDS = {"value_float": "float32", "value_floats": "float32", "value_int": "int64", "value_ints": "int64"}


def load(source: str | os.PathLike[str] | onnx.ModelProto) -> ir.Model:
    """Read a model from a path or a ModelProto, which is not changed; every node gets a name.

    Raises:
        FormatError: No ONNX file, truncated, with contradictions, or one that ONNX Runtime refuses.
    """
    model = _read_declared(source)
    refuse_invalid(model, _name(source))
    _correct_shapes(model)
    return model


def _check_graph(model: ir.Model, name: str) -> None:
    """Raise FormatError for a graph that no runtime runs."""
    if not model.opset_imports or len(model.graph) == 0:
        raise FormatError(f"{name} is not an ONNX model: it has no operators.")
    if not model.graph.outputs:
        raise FormatError(f"{name} has no outputs.")
    _check_versions(model, name)
    _check_names(model, name)


def _check_versions(model: ir.Model, name: str) -> None:
    given = {"opset": model.opset_imports.get("", 0), "IR version": model.ir_version}
    newest = {"opset": onnx.defs.onnx_opset_version(), "IR version": onnx.IR_VERSION}
    for what, version in given.items():
        if version > newest[what]:
            raise FormatError(
                f"{name} has {what} {version}; the newest that onnx {onnx.__version__} knows is {newest[what]}."
            )


def _is_given(value: ir.Value) -> bool:
    return value.producer() is not None or value.is_graph_input() or value.is_initializer()


def _check_names(model: ir.Model, name: str) -> None:
    for node in model.graph.all_nodes():
        values = [value for value in (*node.inputs, *node.outputs) if value is not None]
        # What is no UTF-8 is read as bytes.
        if any(isinstance(text, bytes) for text in (node.name, node.op_type, *(value.name for value in values))):
            raise FormatError(f"{name} is damaged: a name at the node {node.name!r} is no text.")
        for value in values:
            if not _is_given(value):
                raise FormatError(
                    f"{name} is not an ONNX model: {node.name} reads {quoted(value.name or '')}, which nothing gives."
                )
    for value in model.graph.outputs:
        if not _is_given(value):
            raise FormatError(f"{name} is not an ONNX model: nothing gives its output {quoted(value.name or '')}.")


def is_quantized(node: ir.Node) -> bool:
    """Return True where a node makes, reads or computes codes."""
    return node.op_type in _QUANTIZED_OPS or node.op_type.startswith("QLinear")


def refuse_quantized(model: ir.Model) -> None:
    """Raise ConfigError for a model that is quantized already."""
    for node in model.graph.all_nodes():
        if is_quantized(node):
            raise ConfigError(f"The model is quantized already: it holds {node.op_type} ({node.name}).")


def refuse_invalid(model: ir.Model, name: str) -> None:
    """Raise FormatError for a model that ONNX Runtime does not load; where it has no say, onnx.checker has.

    It has none about operators that it does not know or has no kernel for.
    """
    try:
        if (folder := _only_folder(model)) is not None:
            # The runtime maps what it finds in files, and copies arrays. Of a link to another folder it will not hear.
            with suppress(FormatError):
                require_loads(ir.to_proto(model), name, folder=folder)
                return
        message, weights = split_weights(model)
        require_loads(message, name, weights)
    except NotSupportedError:
        if weight_bytes(model) < PROTOBUF_LIMIT and not files_read(model):
            check_valid(to_proto(model), f"{name} is no valid ONNX model")


def _only_folder(model: ir.Model) -> Path | None:
    """The folder of all weights that are not small, if they are in files of one."""
    tensors = [value.const_value for value in model.graph.initializers.values()]
    large = [tensor for tensor in tensors if tensor is not None and tensor.nbytes >= SMALL]
    folders = {os.fspath(tensor.base_dir) if isinstance(tensor, ir.ExternalTensor) else None for tensor in large}
    folder = folders.pop() if len(folders) == 1 else None
    return None if folder is None else Path(folder)


def read(source: str | os.PathLike[str] | onnx.ModelProto) -> ir.Model:
    """Read a model that may be quantized, and that ONNX Runtime need not load.

    Raises:
        FormatError: No ONNX file, truncated, without opset, operators or outputs, of an opset that does not exist yet,
            with two things of one name, with a tensor whose data are missing, of another size than its shape, or
            outside the folder of the model, or with functions or bodies without end.
    """
    model = _read_declared(source)
    _correct_shapes(model)
    return model


def _read_declared(source: str | os.PathLike[str] | onnx.ModelProto) -> ir.Model:
    """Read a model with the shapes that the file declares."""
    if not isinstance(source, (str, os.PathLike, onnx.ModelProto)):
        raise FormatError(f"A model is a path or a ModelProto, got {type(source).__name__}.")
    name = _name(source)
    arrays: dict[str, Any] = {}
    if isinstance(source, onnx.ModelProto):
        proto, folder = source, Path()
        check_message(proto, name, folder)
        if has_parts(proto):
            proto = onnx.ModelProto()
            proto.CopyFrom(source)
    else:
        folder = Path(source).parent
        proto, arrays = read_light(source)
    fill_in(proto, folder)
    try:
        with _quiet():
            model = ir.from_proto(proto)
    except Exception as error:  # whatever onnx_ir, numpy or protobuf says about a damaged message
        raise FormatError(f"{name} is not an ONNX model, or damaged: {reason(error)}") from error
    for key, array in arrays.items():
        model.graph.initializers[key].const_value = ir.Tensor(array, name=key)
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = LinkedTensor.of(value.const_value, folder)
    _check_graph(model, name)
    try:
        model.graph.sort()
    except ValueError as error:
        raise FormatError(f"{name} is not an ONNX model: {str(error).rstrip('.')}.") from None
    name_nodes(model)
    _name_omitted(model)
    _mend_sizes(model)
    return model


def _name(source: str | os.PathLike[str] | onnx.ModelProto) -> str:
    return "The ModelProto" if isinstance(source, onnx.ModelProto) else os.fspath(source)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence onnx_ir: the error says what is damaged in a model, and an inference that fails changes nothing."""
    library = logging.getLogger("onnx_ir")
    level = library.level
    library.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        library.setLevel(level)


SHARED_NAME = "quark.shared_name"
"""Key in `meta` of a node: the name that it had with others."""


def name_nodes(model: ir.Model) -> None:
    """Give every node a name of its own: a free one to those without, and to all but the first of those of one name."""
    used = {node.name for node in model.graph.all_nodes() if node.name}
    seen: set[str] = set()
    for index, node in enumerate(model.graph.all_nodes()):
        if node.name in seen:
            node.meta[SHARED_NAME] = node.name
        if not node.name or node.name in seen:
            node.name = free_name(f"{node.name or node.op_type}_{index}", used)
            used.add(node.name)
        seen.add(node.name)


def _mend_sizes(model: ir.Model) -> None:
    """Make sizes below 0, as some exporters write them, what they mean to the runtime: unknown.

    The default of STFT, half of the spectrum, is written where it is left out: onnx infers the shape of the whole one.
    """
    for node in model.graph.all_nodes():
        if node.op_type == "STFT" and node.domain in ("", "ai.onnx") and "onesided" not in node.attributes:
            node.attributes["onesided"] = ir.AttrInt64("onesided", 1)
    made = (value for node in model.graph.all_nodes() for value in node.outputs)
    for value in (*model.graph.inputs, *model.graph.outputs, *made):
        if value.shape is not None and any(isinstance(size, int) and size < 0 for size in value.shape):
            open_sizes = (None if isinstance(size, int) and size < 0 else size for size in value.shape)
            value.shape = ir.Shape(open_sizes)


def _name_omitted(model: ir.Model) -> None:
    """Name the outputs that are left out of a list, as that of Split: none is optional, and the runtime dies of it."""
    used = {value.name for node in model.graph.all_nodes() for value in (*node.inputs, *node.outputs) if value}
    for node in model.graph.all_nodes():
        for index, value in enumerate(node.outputs):
            if not value.name and _gives_list(model, node):
                value.name = free_name(f"{node.name}_output_{index}", used)
                used.add(value.name)


def _gives_list(model: ir.Model, node: ir.Node) -> bool:
    """Return True where the last output of an operator stands for any number of them."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset(model), "" if node.domain == "ai.onnx" else node.domain)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.outputs) and schema.outputs[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic


def _infer(model: ir.Model) -> None:
    """Run the inference of ONNX; the pass would put large initializers after the others."""
    initializers = model.graph.initializers
    order = list(initializers)
    with _quiet():
        ShapeInferencePass(check_type=False, strict_mode=False)(model)
    for name in order:
        initializers[name] = initializers.pop(name)


def infer_shapes(model: ir.Model) -> None:
    """Fill in the types and shapes that follow from the inputs; values with unknown ones stay as they are."""
    untyped = [value for node in model.graph.all_nodes() for value in node.outputs if value.name and value.type is None]
    if any(_MAKES_NO_TENSOR.search(node.op_type) for node in model.graph.all_nodes()):
        # The pass takes a sequence for a tensor of its elements, and an optional likewise.
        infer_types(model, untyped)
    shapes = {value: value.shape for value in untyped if value.type is not None}
    with _quiet():
        ShapeInferencePass(check_type=False, strict_mode=False)(model)
    for value, shape in shapes.items():
        if not isinstance(value.type, ir.TensorType):
            value.shape = shape


def infer_types(model: ir.Model, values: Iterable[ir.Value]) -> None:
    """Give values that have no type or shape those that ONNX infers, be it a sequence.

    Not by the pass of onnx_ir, which takes the large weights away meanwhile: codes are computed from float weights.
    """
    proto, _ = split_weights(model)
    try:
        inferred = onnx.shape_inference.infer_shapes(proto)
    except Exception:  # noqa: BLE001 - an operator that it cannot take apart: what it would say is seen at run time
        return
    infos = {info.name: info for graph in _graphs(inferred.graph) for info in (*graph.value_info, *graph.output)}
    for value in values:
        if value.name in infos and infos[value.name].type.WhichOneof("value") is not None:
            found = ir.serde.deserialize_value_info_proto(infos[value.name], None)
            value.type, value.shape = value.type or found.type, value.shape or found.shape


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and the bodies within it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for body in bodies_of(attribute):
                yield from _graphs(body)


def _correct_shapes(model: ir.Model) -> None:
    """Replace shapes within the graph that contradict what follows from its inputs, as the runtime does."""
    before = {value: (value.type, value.shape) for node in model.graph.all_nodes() for value in node.outputs}
    inside = [value for node in model.graph for value in node.outputs if not value.is_graph_output()]
    declared = [value for value in inside if value.shape is not None]
    if not declared:
        return
    for value in declared:
        value.shape = None
    _infer(model)
    inferred = {value: value.shape for value in declared}
    for value, (kind, shape) in before.items():
        value.type, value.shape = kind, shape
    for value, shape in inferred.items():
        if not _agree(shape, value.shape):
            value.shape = shape


def _agree(one: ir.Shape | None, other: ir.Shape | None) -> bool:
    """Return True where a tensor may have both shapes; None is any."""
    if one is None or other is None:
        return True
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in pairs)


def opset(model: ir.Model) -> int:
    """Version of the ai.onnx operators."""
    return int(model.opset_imports.get("", 0))


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """The model as a ModelProto, weights inside; over 2 GB, which no message holds, those in files stay there."""
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    outside = {value: tensor for value in values if isinstance(tensor := value.const_value, ir.ExternalTensor)}
    if not outside or weight_bytes(model) >= PROTOBUF_LIMIT:
        return ir.to_proto(model)
    try:
        for value, tensor in outside.items():
            value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, shape=tensor.shape, name=value.name)
        return ir.to_proto(model)
    finally:
        for value, tensor in outside.items():
            value.const_value = tensor


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
    with named_as_external(model, list(values.values())):
        proto = ir.to_proto(model)
    return proto, {
        name: np.asarray(tensor.numpy(), order="C") for name, tensor in tensors.items() if tensor is not None
    }


def checked_proto(model: ir.Model) -> onnx.ModelProto:
    """The message of a model, accepted by onnx.checker or ONNX Runtime, which cannot see one over 2 GB.

    Raises:
        FormatError: The model is not valid.
    """
    proto = to_proto(model)
    if weight_bytes(model) < PROTOBUF_LIMIT and not files_read(model):
        check_valid(proto, "The result is no valid ONNX model")
    return proto


def is_constant(value: ir.Value | None) -> bool:
    """Return True where `constant` gives an array, without reading it."""
    if value is None or value.is_graph_input():
        return False
    node = value.producer()
    if node is None or value.const_value is not None:
        return value.const_value is not None
    return node.op_type == "Constant" and set(node.attributes) <= {"value", *CONSTANT_KINDS}


def live_inputs(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of a node that are not constant."""
    return [value for value in node.inputs if value is not None and not is_constant(value)]


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
