"""compact: what a file need not say twice, or at all.

Constants of the same bits are written once. Types and shapes within a graph are left out where ONNX's shape inference,
which every runtime does as it loads, gives them back from the inputs; after operators that it does not know they stay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import onnx
import onnx_ir as ir

from quark.onnx_ops.graph_writer import add_constant, free_name
from quark.onnx_ops.saving import SMALL, message_without_weights

_LARGEST_COMPUTED = 2**20
"""Bytes of a constant that is still computed to be compared: larger ones are weights, shared where their source is."""
_INFERRED_BY_RUNTIME = ("QuantizeLinear", "DequantizeLinear")
"""Operators of com.microsoft of which the runtime infers what ONNX does of those of its own of these names."""
ROUNDS = 4
"""How often what inference misses is told it, bit by bit; after these, all of it stays."""

_Infos = dict[str, onnx.ValueInfoProto]


def share_constants(model: ir.Model) -> int:
    """Let all readers of constants of the same type, shape and bits in a graph read the first one.

    So do bodies of If, Loop and Scan with the large ones of each other, which move into the graph around them. Small
    ones may be shapes, which inference looks for beside their readers.

    Returns:
        How many constants are gone.
    """
    graphs = list(_with_bodies(model.graph))
    count = sum(map(_share, graphs))
    taken = set().union(*map(_names, graphs))
    for values in _equal_constants(graphs, SMALL) if len(graphs) > 1 else ():
        inside = [value for value in values if value.graph is not model.graph]
        outside = [value for value in values if value.graph is model.graph]
        if len(values) > 1 and not outside:
            assert values[0].const_value is not None
            outside = [add_constant(model.graph, free_name(values[0].name or "", taken), values[0].const_value)]
            taken.add(outside[0].name)
        count += _read_instead(inside, outside[0]) if outside else 0
    return count


def _names(graph: ir.Graph) -> set[str | None]:
    made = (value for node in graph for value in node.outputs)
    return {value.name for value in (*graph.inputs, *graph.initializers.values(), *made)}


def _share(graph: ir.Graph) -> int:
    return sum(_read_instead(values[1:], values[0]) for values in _equal_constants([graph]))


def _equal_constants(graphs: list[ir.Graph], at_least: int = 0) -> Iterator[list[ir.Value]]:
    """The constants of these graphs, of so many bytes at least, in groups of the same type, shape and bits."""
    similar: dict[tuple[object, ...], list[tuple[ir.Value, ir.TensorProtocol]]] = {}
    for value in (value for graph in graphs for value in graph.initializers.values()):
        tensor = value.const_value
        if tensor is not None and tensor.nbytes >= at_least and _may_be_shared(value, tensor):
            similar.setdefault((tensor.dtype, *tensor.shape.numpy()), []).append((value, tensor))
    for pairs in (pairs for pairs in similar.values() if len(pairs) > 1):
        same: dict[bytes, list[ir.Value]] = {}
        for value, tensor in pairs:
            same.setdefault(hashlib.sha256(tensor.tobytes()).digest(), []).append(value)
        yield from same.values()


def _may_be_shared(value: ir.Value, tensor: ir.TensorProtocol) -> bool:
    # An input with a default may get another value; what is an output has a name that is asked for.
    if value.is_graph_input() or value.is_graph_output() or tensor.dtype is ir.DataType.STRING:
        return False
    return tensor.nbytes <= _LARGEST_COMPUTED or not isinstance(tensor, ir.LazyTensor)


def _read_instead(values: list[ir.Value], kept: ir.Value) -> int:
    """Let the readers of constants read another, and drop them; return how many."""
    for value in values:
        value.replace_all_uses_with(kept)
        assert value.graph is not None
        del value.graph.initializers[value.name or ""]
    return len(values)


def drop_inferable(model: ir.Model) -> int:
    """Take their types and shapes from the tensors within a model of which shape inference gives them back.

    Sizes that only have a name count as open: inference gives them names of its own.

    Returns:
        How many tensors have none any more.
    """
    count, needed = 0, _not_inferred(message_without_weights(model))
    for graph, kept in zip(_with_bodies(model.graph), needed, strict=True):
        made = (value for node in graph for value in node.outputs)
        for value in (*made, *(constant for constant in graph.initializers.values() if not constant.is_graph_input())):
            # What is an output, a constant too, has its type by the standard.
            if value.is_graph_output() or value.name in kept:
                continue
            if value.type is not None or value.shape is not None:
                value.type = value.shape = None
                count += 1
    return count


def _not_inferred(proto: onnx.ModelProto) -> list[set[str]]:
    """The tensors of each graph of a model whose types and shapes do not follow; the message is changed."""
    for node in (node for graph in _graphs(proto.graph) for node in graph.node):
        if node.domain == "com.microsoft" and node.op_type in _INFERRED_BY_RUNTIME:
            node.domain = ""
    declared = [_declared(graph) for graph in _graphs(proto.graph)]
    kept: list[set[str]] = [set() for _ in declared]
    for _ in range(ROUNDS):
        missing = _missing(proto, declared, kept)
        if not any(missing):
            return kept
        anywhere = set().union(*missing)
        for graph, names, stays in zip(_graphs(proto.graph), missing, kept, strict=True):
            # Told the first that it misses, inference finds those after it.
            for node in graph.node:
                if not anywhere.intersection(node.input):
                    stays |= names.intersection(node.output)
    return [stays | names for stays, names in zip(kept, _missing(proto, declared, kept), strict=True)]


def _declared(graph: onnx.GraphProto) -> _Infos:
    """Return what a graph says of its tensors, constants apart."""
    constants = {tensor.name for tensor in graph.initializer}
    return {info.name: info for info in graph.value_info if info.name not in constants}


def _missing(proto: onnx.ModelProto, declared: list[_Infos], kept: list[set[str]]) -> list[set[str]]:
    """The names in each graph of which inference, told those that are kept, does not say what was declared."""
    for graph, infos, names in zip(_graphs(proto.graph), declared, kept, strict=True):
        del graph.value_info[:]
        graph.value_info.extend(info for name, info in infos.items() if name in names)
    try:
        inferred = onnx.shape_inference.infer_shapes(proto)
    except Exception:  # noqa: BLE001 - an operator that it cannot take apart: then it infers nothing
        return [set(infos) for infos in declared]
    result = []
    for graph, infos in zip(_graphs(inferred.graph), declared, strict=True):
        found = {info.name: info for info in graph.value_info}
        result.append({name for name, info in infos.items() if name not in found or not _says(found[name], info)})
    return result


def _says(found: onnx.ValueInfoProto, declared: onnx.ValueInfoProto) -> bool:
    """Return True where a found type says all that the declared one does, names of open sizes apart."""
    if not declared.type.HasField("tensor_type"):
        return found.type == declared.type
    tensor, wanted = found.type.tensor_type, declared.type.tensor_type
    if wanted.elem_type not in (onnx.TensorProto.UNDEFINED, tensor.elem_type):
        return False
    if not wanted.HasField("shape"):
        return True
    if not tensor.HasField("shape") or len(tensor.shape.dim) != len(wanted.shape.dim):
        return False
    pairs = zip(tensor.shape.dim, wanted.shape.dim, strict=True)
    return all(not size.HasField("dim_value") or one.dim_value == size.dim_value for one, size in pairs)


def _with_bodies(graph: ir.Graph) -> Iterator[ir.Graph]:
    """A graph and the bodies within it, each before those within it."""
    yield graph
    for node in graph:
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.GRAPH:
                yield from _with_bodies(attribute.as_graph())


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield the graph of a message and the bodies within it, each before those within it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)
