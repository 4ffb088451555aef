"""The door of a file: what is read of it before anything is made of it.

onnx_ir keeps one of two things of one name, and a runtime copies the body of a function to where it is called. So
names, nesting and functions are checked in the message itself, and every tensor in it, wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from quark.errors import FormatError
from quark.onnx.graph.check_tensors import check_tensor, dense, embed, quoted, tensors_of

DEEPEST = 24
"""Bodies within bodies, and functions within functions. Protobuf itself reads 33 bodies."""
MOST_NODES = 20_000
"""Nodes that functions become when they are written out. ONNX Runtime takes a minute for so many."""

Key = tuple[str, str, str]
Nodes = Sequence[onnx.NodeProto]


def check_proto(model: onnx.ModelProto, folder: Path, elsewhere: Container[str] = ()) -> None:
    """Raise FormatError for a message that contradicts itself; says what and where, not in which file.

    Args:
        model: As it was read, external data not.
        folder: Where external data lie.
        elsewhere: Names of initializers of the graph whose data were taken out, and are as their shapes need.
    """
    for text in (model.producer_name, model.producer_version, model.domain, model.doc_string, model.graph.name):
        _check_text(text, "the model")
    if not model.HasField("ir_version"):
        raise FormatError("it has no IR version.")
    if not {entry.domain for entry in model.opset_import} & {"", "ai.onnx"} and any(
        node.domain in ("", "ai.onnx") for node in _all_nodes(model.graph.node)
    ):
        raise FormatError("it has operators of ai.onnx and no version (opset_import) of that domain.")
    places = [("", model.graph, 0)]
    functions: dict[Key, onnx.FunctionProto] = {}
    for function in model.functions:
        key = (function.domain, function.name, function.overload)
        if key in functions:
            raise FormatError(f"two functions have the name {quoted(function.name)}, of domain {function.domain!r}.")
        functions[key] = function
        where = f" in the function {quoted(function.name)}"
        _once(function.input, "inputs" + where)
        _once(function.attribute, "attributes" + where)
        places += _check_nodes(function.node, where, 0, folder)
    while places:
        where, graph, depth = places.pop()
        if depth > DEEPEST:
            raise FormatError(f"bodies lie within each other, over {DEEPEST} deep{where}.")
        _check_graph(graph, where, folder, () if where else elsewhere)
        places += _check_nodes(graph.node, where, depth, folder)
    _check_expansion(model.graph, functions)


def _check_graph(graph: onnx.GraphProto, where: str, folder: Path, elsewhere: Container[str]) -> None:
    sparse = [tensor.values.name for tensor in graph.sparse_initializer]
    _once([tensor.name for tensor in graph.initializer] + sparse, f"initializers{where}")
    _once([value.name for value in graph.input], f"inputs{where}")
    if not all((*(tensor.name for tensor in graph.initializer), *sparse)):
        raise FormatError(f"an initializer{where} has no name.")
    for tensor in graph.initializer:
        if tensor.name in elsewhere:
            continue
        check_tensor(tensor, f"the initializer {quoted(tensor.name)}{where}", folder)
    for name, whole in zip(sparse, graph.sparse_initializer, strict=True):
        dense(whole, f"the initializer {quoted(name)}{where}", folder)
    for value in (*graph.input, *graph.output, *graph.value_info):
        _check_type(value, where)
    inputs = {value.name: value for value in graph.input}
    for value in graph.output:
        if value.name in inputs and not _may_be_one(inputs[value.name], value):
            raise FormatError(f"{quoted(value.name)}{where} has one shape as an input and another as an output.")


def _check_type(value: onnx.ValueInfoProto, where: str) -> None:
    kinds, types = {*onnx.TensorProto.DataType.values()} - {onnx.TensorProto.UNDEFINED}, [value.type]
    while types:
        given = types.pop()
        kind = given.WhichOneof("value")
        inner: Any = getattr(given, kind) if kind else None
        if kind in ("tensor_type", "sparse_tensor_type") and inner.elem_type not in kinds:
            raise FormatError(f"{quoted(value.name)}{where} has the element type {inner.elem_type}, which is none.")
        if kind == "opaque_type":
            raise FormatError(f"{quoted(value.name)}{where} is opaque, which nothing computes with.")
        types += [inner.elem_type] if kind in ("sequence_type", "optional_type") else []


def _may_be_one(one: onnx.ValueInfoProto, other: onnx.ValueInfoProto) -> bool:
    """Return True where a tensor can have both types; onnx_ir keeps the second."""
    types = [value.type.tensor_type for value in (one, other) if value.type.HasField("tensor_type")]
    shapes = [[size.dim_value for size in kind.shape.dim] for kind in types if kind.HasField("shape")]
    if len(types) < 2 or len(shapes) < 2:
        return True
    same = len(shapes[0]) == len(shapes[1]) and all(a == b or not a * b for a, b in zip(*shapes, strict=True))
    return same and types[0].elem_type == types[1].elem_type


def _check_nodes(nodes: Nodes, where: str, depth: int, folder: Path) -> list[tuple[str, onnx.GraphProto, int]]:
    """Check what nodes hold themselves; return the bodies that they hold."""
    bodies = []
    for node in nodes:
        who = f"the node {quoted(node.name or node.op_type)}{where}"
        for name in (node.name, node.op_type, node.domain, *node.input, *node.output):
            _check_text(name, who)
        if node.device_configurations:
            raise FormatError(f"{who} is spread over devices (device_configurations), for tensors as they are.")
        _once([attribute.name for attribute in node.attribute], f"attributes of {who}")
        for attribute in node.attribute:
            of = f"the attribute {quoted(attribute.name)} of {who}"
            _check_value(attribute, of)
            for tensor in tensors_of(attribute):
                check_tensor(tensor, of, folder)
            for whole in (attribute.sparse_tensor, *attribute.sparse_tensors):
                if whole is not attribute.sparse_tensor or attribute.HasField("sparse_tensor"):
                    dense(whole, of, folder)
            bodies += [(f" in the body {quoted(attribute.name)} of {who}", g, depth + 1) for g in bodies_of(attribute)]
    return bodies


def _check_value(attribute: onnx.AttributeProto, of: str) -> None:
    """Raise FormatError for an attribute whose value is not the one that its type names."""
    fields = {"floats": "FLOATS", "ints": "INTS", "strings": "STRINGS", "tensors": "TENSORS", "graphs": "GRAPHS"}
    fields |= {"type_protos": "TYPE_PROTOS", "sparse_tensors": "SPARSE_TENSORS"}
    given = {kind for name, kind in fields.items() if len(getattr(attribute, name))}
    single = {"f": "FLOAT", "i": "INT", "s": "STRING", "t": "TENSOR", "g": "GRAPH", "tp": "TYPE_PROTO"}
    single |= {"sparse_tensor": "SPARSE_TENSOR"}
    given |= {kind for name, kind in single.items() if attribute.HasField(name)}
    kinds = onnx.AttributeProto.AttributeType
    kind = kinds.Name(attribute.type) if attribute.type in kinds.values() else str(attribute.type)
    # An empty list is a value.
    may_lack = attribute.ref_attr_name or kind in fields.values()
    if kind == "UNDEFINED" or given - {kind} or not (given or may_lack):
        values = " and ".join(sorted(given)).lower() or "no value"
        raise FormatError(f"{of} has the type {kind.lower()}, but its value is {values}.")


def _once(names: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise FormatError(f"two {what} have the name {quoted(name)}.")
        _check_text(name, f"the {what}")
        seen.add(name)


def _check_text(name: str | bytes, who: str) -> None:
    """Raise FormatError for a name that C libraries cut, or that is no UTF-8: protobuf gives that as bytes."""
    if isinstance(name, bytes):
        raise FormatError(f"{who} is damaged: a name is no text: {quoted(name)}.")
    if "\0" in name:
        raise FormatError(f"{who} has a name with a NUL character: {quoted(name)}.")


def bodies_of(attribute: onnx.AttributeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that an attribute holds."""
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs


def _check_expansion(graph: onnx.GraphProto, functions: dict[Key, onnx.FunctionProto]) -> None:
    """Raise FormatError where functions call themselves, or make too deep or too large a graph when written out."""
    sizes: dict[Key, tuple[int, int]] = {}

    def measure(nodes: Iterable[onnx.NodeProto], calls: tuple[Key, ...]) -> tuple[int, int]:
        """Nodes, and levels of functions, of what some nodes become."""
        own, written, depth = 0, 0, 0
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            if key not in functions:
                own += 1
                continue
            if key in calls or len(calls) >= DEEPEST:
                what = "calls itself" if key in calls else f"lies {DEEPEST} functions deep"
                raise FormatError(f"the function {quoted(node.op_type)} {what}.")
            if key not in sizes:
                sizes[key] = measure(_all_nodes(functions[key].node), (*calls, key))
            written, depth = written + sizes[key][0], max(depth, sizes[key][1] + 1)
        if written > MOST_NODES:
            caller = f"the function {quoted(calls[-1][1])}" if calls else "the graph"
            raise FormatError(f"{caller} takes over {MOST_NODES} nodes when the functions it calls are written out.")
        return own + written, depth

    _, depth = measure(_all_nodes(graph.node), ())
    if depth > DEEPEST:
        raise FormatError(f"functions call each other {depth} deep; possible: {DEEPEST}.")


def _all_nodes(nodes: Nodes) -> Iterator[onnx.NodeProto]:
    """Nodes, and those of their bodies."""
    stack = [nodes]
    while stack:
        for node in stack.pop():
            yield node
            stack += [graph.node for attribute in node.attribute for graph in bodies_of(attribute)]


def has_parts(model: onnx.ModelProto) -> bool:
    """Return True where `fill_in` would change the model."""
    return any(True for _ in _changes(model, Path()))


def fill_in(model: onnx.ModelProto, folder: Path) -> None:
    """Write out sparse tensors, and read in what lies outside but is no initializer of the graph.

    Both are things that onnx_ir does not carry through; of what is checked, a few small tensors are meant.
    """
    for change in list(_changes(model, folder)):
        change()


def _changes(model: onnx.ModelProto, folder: Path) -> Iterator[Callable[[], None]]:
    """The changes of `fill_in`."""
    graphs, stack = [model.graph], [model.graph.node, *(function.node for function in model.functions)]
    while stack:
        for node in stack.pop():
            for attribute in node.attribute:
                for tensor in tensors_of(attribute):
                    if tensor.data_location == onnx.TensorProto.EXTERNAL:
                        yield partial(embed, tensor, quoted(tensor.name), folder)
                if node.op_type == "Constant" and attribute.HasField("sparse_tensor"):
                    yield partial(_make_dense, attribute, folder)
                graphs += bodies_of(attribute)
                stack += [graph.node for graph in bodies_of(attribute)]
    for graph in graphs:
        for tensor in graph.initializer if graph is not model.graph else ():
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                yield partial(embed, tensor, quoted(tensor.name), folder)
        if graph.sparse_initializer:
            yield partial(_write_out, graph, folder)


def _make_dense(attribute: onnx.AttributeProto, folder: Path) -> None:
    attribute.t.CopyFrom(dense(attribute.sparse_tensor, quoted(attribute.name), folder))
    attribute.ClearField("sparse_tensor")
    attribute.name, attribute.type = "value", onnx.AttributeProto.TENSOR


def _write_out(graph: onnx.GraphProto, folder: Path) -> None:
    graph.initializer.extend(dense(tensor, quoted(tensor.values.name), folder) for tensor in graph.sparse_initializer)
    graph.ClearField("sparse_initializer")
