"""GraphWriter: the one way to add nodes and constants to an ONNX graph.

    y = writer.node("Mul", [x, writer.constant("factor", array)], "x_Mul")
    writer.replace(node, y)

New nodes wait until it is said where they stand: by `insert_before`, `insert_after`, or `replace`.
Names that are taken get underscores at their end.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.errors import ConfigError
from quark.onnx_ops.operators import DOMAIN, MINIMUM_IR, VERSION, Operator, function

Values = NumpyArray | Callable[[], NumpyArray]
"""An array, or what computes it each time that it is read: memory holds one at a time, and it may change till then."""


def free_name(name: str, *taken: Container[str | None]) -> str:
    """Return the name, with as many underscores at its end as it takes to be free."""
    while any(name in names for names in taken):
        name += "_"
    return name


def producer_of(value: ir.Value) -> ir.Node:
    """The node that gives a value which some node gives."""
    node = value.producer()
    assert node is not None
    return node


def fixed_shape(tensor: ir.TensorProtocol) -> ir.Shape:
    """The shape of a tensor as that of a value."""
    return ir.Shape([int(size) for size in tensor.shape.numpy()])


def add_constant(graph: ir.Graph, name: str, content: NumpyArray | ir.TensorProtocol) -> ir.Value:
    """A new initializer of an array, or of a tensor, which may be another's: it is neither copied nor renamed."""
    # Not `ir.tensor`, which takes ten times as long to find out that it has an array: thousands are made for a model.
    tensor = ir.Tensor(content) if isinstance(content, (np.ndarray, np.generic)) else content
    name, shape = free_name(name, graph.initializers), fixed_shape(tensor)
    lazy = ir.LazyTensor(lambda: tensor, dtype=tensor.dtype, shape=shape, name=name)
    value = ir.Value(name=name, const_value=lazy, type=ir.TensorType(tensor.dtype), shape=shape)
    graph.register_initializer(value)
    return value


def redirect(old: ir.Value, new: ir.Value) -> bool:
    """Make every reader of `old` read `new`, which takes its name where it is an output.

    Returns:
        False, with nothing done, where `old` is an output and `new` is an input, an initializer or another output.
    """
    if old.is_graph_output():
        if new.producer() is None or new.is_graph_output() or new.graph is not old.graph:
            return False
        new.name, old.name = old.name, None
    if new.type is None:
        new.type = old.type
    if new.shape is None:
        new.shape = old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    return True


class GraphWriter:
    """Adds to the graph of one model.

    Args:
        model: Changed in place.
        typed: Whether the outputs of new nodes get a type: float32, or the one that a call names.

    Attributes:
        opset: Version of its operators.
    """

    def __init__(self, model: ir.Model, typed: bool = False) -> None:
        self.model, self.graph = model, model.graph
        self.opset = int(model.opset_imports.get("", 0))
        self._typed = typed
        self._node_names = {node.name for node in self.graph}
        self._value_names = {value.name for node in self.graph for value in node.outputs}
        self._value_names |= {value.name for value in self.graph.inputs}
        self._shared: dict[str, ir.Value] = {}
        self._waiting: list[ir.Node] = []

    def kind(self, name: str) -> ir.DataType:
        """The element type named `name` in ONNX."""
        return ir.DataType[name]

    def require(self, opset: int, what: str) -> None:
        """Raise ConfigError if the model's opset is older than what a form needs."""
        if self.opset < opset:
            raise ConfigError(f"{what} needs opset {opset}; the export asks for opset_version={self.opset}.")

    # Nodes -----------------------------------------------------------------------------------------------------------

    def has_node(self, name: str) -> bool:
        """Return True where a node has this name."""
        return name in self._node_names

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        attributes: Mapping[str, Any] | None = None,
        kind: str = "FLOAT",
        *,
        domain: str = "",
        output: str | None = None,
    ) -> ir.Value:
        """The output of a new node.

        Args:
            op_type, inputs, attributes, domain: Of the node.
            name: Of the node.
            kind: Element type of the output, where the writer gives types.
            output: Name of the output; by default that of the node and `_Output`.
        """
        if domain:
            self.model.opset_imports.setdefault(domain, 1)
        return self._add(ir.node(op_type, inputs, attributes, domain=domain), name, kind, output)

    def call(self, operator: Operator, inputs: Sequence[ir.Value], name: str, output: str | None = None) -> ir.Value:
        """The output of a node of an extended operator; the model gets its function, and the IR version for it."""
        key = (DOMAIN, operator.name, operator.overload)
        if key not in self.model.functions:
            self.model.functions[key] = ir.serde.deserialize_function(function(operator, self.opset))
            self.model.opset_imports[DOMAIN] = VERSION
            self.model.ir_version = max(self.model.ir_version, MINIMUM_IR)
        attributes, overload = dict(operator.attributes), operator.overload
        node = ir.node(operator.name, inputs, attributes, domain=DOMAIN, overload=overload)
        return self._add(node, name, "FLOAT", output)

    def dynamic_codes(self, x: ir.Value, name: str) -> Sequence[ir.Value]:
        """Codes, scale and zero point of a DynamicQuantizeLinear."""
        node = ir.node("DynamicQuantizeLinear", [x], num_outputs=3)
        self._add(node, name, "UINT8")
        for output, suffix in zip(node.outputs[1:], ("scale", "zero_point"), strict=True):
            output.name = f"{node.name}_{suffix}"
        return node.outputs

    def cast(self, value: ir.Value, to: ir.DataType | None, name: str) -> ir.Value:
        """The value in another type; itself if it has that type."""
        if to is None or value.dtype == to:
            return value
        return self.node("Cast", [value], name, {"to": int(to)}, to.name)

    def _add(self, node: ir.Node, name: str, kind: str, output: str | None = None) -> ir.Value:
        node.name = free_name(name, self._node_names)
        self._node_names.add(node.name)
        value = node.outputs[0]
        value.name = free_name(output or f"{node.name}_Output", self._value_names)
        self._value_names.add(value.name)
        if self._typed:
            value.type = ir.TensorType(ir.DataType[kind])
        self._waiting.append(node)
        return value

    # Where new nodes stand -------------------------------------------------------------------------------------------

    def insert_before(self, node: ir.Node) -> None:
        """Put the new nodes before another."""
        self.graph.insert_before(node, self._waiting)
        self._waiting = []

    def insert_after(self, producer: ir.Node | None) -> None:
        """Put the new nodes after the one that gives what they read; at the start for None, an input or a constant."""
        if producer is None:
            self.insert_before(self.graph[0])
        else:
            self.graph.insert_after(producer, self._waiting)
            self._waiting = []

    def replace(self, node: ir.Node, result: ir.Value, keep_name: bool = False) -> None:
        """Put the new nodes in the place of `node`, whose output becomes `result`.

        Args:
            node: Removed.
            result: What its readers read; an output of the graph keeps its name.
            keep_name: The output keeps its name in any case.
        """
        old, name = node.outputs[0], node.outputs[0].name
        self.insert_before(node)
        if not redirect(old, result):
            identity = ir.node("Identity", [result])
            self.graph.insert_before(node, [identity])
            redirect(old, identity.outputs[0])
        self.graph.remove(node, safe=True)
        if keep_name:
            old.name, result.name = None, name

    def multiply(self, node: ir.Node, factor: ir.Value, suffix: str) -> ir.Node:
        """Multiply the output of a node by a factor; the product takes its name and readers.

        Args:
            node: With one output, which then has the name of the product with the suffix and `_Input` after it.
            factor: Broadcasts over it.
            suffix: Of the name of the Mul.
        """
        old = node.outputs[0]
        name = old.name or ""
        new = self.node("Mul", [old, factor], f"{node.name}{suffix}")
        self.insert_after(node)
        new.type, new.shape = old.type, old.shape
        old.name, new.name = f"{name}{suffix}_Input", name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        product = producer_of(new)
        product.replace_input_with(0, old)
        return product

    # Constants -------------------------------------------------------------------------------------------------------

    def constant(
        self, name: str, values: Values, kind: ir.DataType | None = None, shape: Sequence[int] | None = None
    ) -> ir.Value:
        """A new constant.

        Args:
            name: Of the constant.
            values: What it holds.
            kind: Its element type; None for that of the array.
            shape: Where `values` computes an array, which is not read before the model is: its shape.
        """
        if callable(values):
            evaluate = values
            assert kind is not None and shape is not None, "what is not computed yet has no type and shape"
        else:
            evaluate, shape = (lambda: values), values.shape
            kind = kind or ir.DataType.from_numpy(values.dtype)
        element_type = kind

        def tensor() -> ir.TensorProtocol:
            return ir.Tensor(np.asarray(evaluate(), element_type.numpy(), order="C"), dtype=element_type)

        lazy = ir.LazyTensor(tensor, dtype=kind, shape=ir.Shape(shape))
        return add_constant(self.graph, free_name(name, self.graph.initializers, self._value_names), lazy)

    def shared(
        self, name: str, values: Values, kind: ir.DataType | None = None, shape: Sequence[int] | None = None
    ) -> ir.Value:
        """The constant of this name: a new one where this writer has none yet."""
        if name not in self._shared:
            self._shared[name] = self.constant(name, values, kind, shape)
        return self._shared[name]
