"""Bodies of If, Loop and Scan: each as a model of its own, and back into the node that holds it.

The inputs of that model are those of the body, then what the body captures: tensors of the graphs around it that it, or
a body within it, reads. Captured constants are initializers of the model, so that they are weights there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import onnx_ir as ir

from quark.onnx.graph.edit import is_op, own_values, prune, replace_output
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.graph.reserved_names import rename
from quark.onnx.operators import HOLDERS
from quark.onnx_ops.graph_writer import add_constant, free_name


@dataclass(frozen=True)
class Body:
    """A body where it is.

    Attributes:
        node: The node that holds it.
        attribute: Under which name.
    """

    node: ir.Node
    attribute: str

    @property
    def graph(self) -> ir.Graph:
        """Its graph."""
        return self.node.attributes[self.attribute].as_graph()

    def __str__(self) -> str:
        return f"{self.node.name}.{self.attribute}"


@dataclass(frozen=True, eq=False)
class _BodyModel:
    """A copy of a body as a model of its own.

    Attributes:
        model: The model.
        own: How many of its inputs, from the first, are those of the body.
        captured: Name of each further input -> the tensor of a graph around the body that it stands for.
        constants: Name of an initializer -> its tensor, and the captured constant that it is a copy of.
    """

    model: ir.Model
    own: int
    captured: dict[str, ir.Value]
    constants: dict[str, tuple[ir.TensorProtocol | None, ir.Value]]


def bodies_of(graph: ir.Graph) -> list[Body]:
    """The bodies that the nodes of a graph hold; not those within bodies."""
    return [
        Body(node, name)
        for node in graph
        if is_op(node, *HOLDERS)
        for name, attribute in node.attributes.items()
        if attribute.type is ir.AttributeType.GRAPH
    ]


def as_model(body: Body, around: ir.Model) -> _BodyModel:
    """A copy of a body as a model of its own.

    Args:
        body: Of a node of `around`.
        around: The model, or a body as one: gives opsets and functions.
    """
    graph = body.graph.clone(allow_outer_scope_values=True)
    names = {value.name for part in _with_bodies(graph) for value in own_values(part)}
    own, made, captured, constants = len(graph.inputs), dict[ir.Value, ir.Value](), {}, {}
    for node, index in captured_reads(graph):
        value = node.inputs[index]
        assert value is not None
        if value not in made:
            # A name of a graph around may be taken where one body hides it from another.
            name = free_name(value.name or "captured", names)
            names.add(name)
            if is_constant(value):
                made[value] = add_constant(graph, name, value.const_value or ir.tensor(constant(value)))
                constants[name] = made[value].const_value, value
            else:
                made[value] = ir.Value(name=name, type=value.type, shape=value.shape)
                graph.inputs.append(made[value])
                captured[name] = value
        node.replace_input_with(index, made[value])
    graph.opset_imports.update(around.opset_imports)
    model = ir.Model(graph, ir_version=around.ir_version, functions=list(around.functions.values()))
    return _BodyModel(model, own, captured, constants)


def captured_reads(graph: ir.Graph) -> Iterator[tuple[ir.Node, int]]:
    """(node, input index) of every read, within a body, of a tensor of a graph around it, in order."""
    inside = set(_with_bodies(graph))
    reads = [(node, index) for node in graph.all_nodes() for index in range(len(node.inputs))]
    for node, index in reads:
        value = node.inputs[index]
        if value is not None and value.graph not in inside:
            yield node, index


def put_back(body: Body, counterpart: Body, changed: _BodyModel, model: ir.Model) -> None:
    """Put a changed copy of a body in the place of the body.

    Args:
        body: Of a node of `model`; as it was copied, but that it may read other tensors around it for the same ones.
        counterpart: The body that was copied.
        changed: The copy. It is used up.
        model: The model, or a body as one.
    """
    graph, current = changed.model.graph, dict[ir.Value, ir.Value]()
    old = body.graph
    reads = {(node.name, index): node.inputs[index] for node, index in captured_reads(old)}
    for node, index in captured_reads(counterpart.graph):
        before, now = node.inputs[index], reads[node.name, index]
        assert before is not None and now is not None
        current[before] = now
    for stands, value in zip(list(graph.inputs)[changed.own :], changed.captured.values(), strict=True):
        _read_instead(graph, stands, current[value])
        graph.inputs.remove(stands)
    _share_constants(changed, current)
    for node in old.all_nodes():
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)
    # What decodes a stored constant around the body may have no reader but the body, which has folded it since.
    for read in [read for read in reads.values() if read is not None]:
        producer = read.producer()
        if producer is not None:
            prune(producer)
    body.node.attributes[body.attribute] = ir.AttrGraph(body.attribute, graph)
    model.functions.update({**changed.model.functions, **model.functions})
    model.opset_imports.update({**changed.model.graph.opset_imports, **model.opset_imports})
    model.ir_version = max(model.ir_version or 0, changed.model.ir_version or 0)
    _free_names(graph, model)


def _share_constants(changed: _BodyModel, current: dict[ir.Value, ir.Value]) -> None:
    """Let a changed copy read constants around it, but those that an algorithm or a pass changed, here or there."""
    graph = changed.model.graph
    for name, (tensor, value) in changed.constants.items():
        copied, now = graph.initializers.get(name), current[value]
        unchanged = copied is not None and copied.const_value is tensor and now.const_value is value.const_value
        if copied is not None and unchanged and now.const_value is not None:
            _read_instead(graph, copied, now)
            del graph.initializers[name]


def _read_instead(graph: ir.Graph, stands: ir.Value, value: ir.Value) -> None:
    """Make what reads an input or initializer of a body read a tensor around it; the body gives a copy of it."""
    if stands.is_graph_output():
        # What a body gives, a node of it must give.
        identity = ir.node("Identity", [stands], name=f"{stands.name}_Identity")
        output = identity.outputs[0]
        output.name, output.type, output.shape = f"{stands.name}_out", stands.type, stands.shape
        graph.append(identity)
        replace_output(graph, stands, output)
    stands.replace_all_uses_with(value)


def _with_bodies(graph: ir.Graph) -> list[ir.Graph]:
    return [graph, *(part for part in graph.subgraphs() if part is not graph)]


def _free_names(graph: ir.Graph, model: ir.Model) -> None:
    """Rename what a body has under a name of the model around it: an inner name must hide no other."""
    inside = _with_bodies(graph)
    outside = [part for part in _with_bodies(model.graph) if part not in inside]
    values = list(chain.from_iterable(map(own_values, inside)))
    own, around = _taken(values), _taken(chain.from_iterable(map(own_values, outside)))
    for value in values:
        if value.name and value.name in around:
            rename(value, free_name(value.name, around, own))
            own.add(value.name)
    nodes = _taken(chain.from_iterable(outside))
    for node in chain.from_iterable(inside):
        node.name = free_name(node.name or node.op_type, nodes)
        nodes.add(node.name)


def _taken(named: Iterable[ir.Value | ir.Node]) -> set[str]:
    return {each.name for each in named if each.name}
