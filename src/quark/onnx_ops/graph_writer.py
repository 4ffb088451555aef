"""GraphWriter: adds nodes and constants to an exported graph in the place of one node after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quark.errors import ConfigError
from quark.onnx_ops import Operator, add_function_node

if TYPE_CHECKING:
    import onnx_ir as ir

Array = np.ndarray[Any, Any]


class GraphWriter:
    """Edits one model.

    Args:
        model: An exported model, changed in place.

    Attributes:
        opset: Version of its operators.
    """

    def __init__(self, model: ir.Model) -> None:
        # onnx_ir takes half a second to import: when a model is really exported.
        import onnx_ir as ir

        self.ir, self.model, self.graph = ir, model, model.graph
        self.opset = int(model.opset_imports.get("", 0))
        # Names of the exported graph; one of ours that is taken gets another.
        self._names = {node.name for node in self.graph} | {v.name for node in self.graph for v in node.outputs}
        self._names |= {value.name for value in self.graph.inputs}
        self._shared: dict[str, ir.Value] = {}
        self._new: list[ir.Node] = []

    def kind(self, name: str) -> ir.DataType:
        """The element type named `name` in ONNX."""
        return self.ir.DataType[name]

    def require(self, opset: int, what: str) -> None:
        """Raise ConfigError if the model's opset is older than what a form needs."""
        if self.opset < opset:
            raise ConfigError(f"{what} needs opset {opset}; the export asks for opset_version={self.opset}.")

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        name: str,
        attributes: Mapping[str, Any] | None = None,
        kind: str = "FLOAT",
    ) -> ir.Value:
        """The output, of the type `kind`, of a new node."""
        return self._added(self.ir.node(op_type, inputs, attributes), name, self.kind(kind))

    def call(self, operator: Operator, inputs: Sequence[ir.Value], name: str) -> ir.Value:
        """The output of a node of an extended operator."""
        return self._added(add_function_node(self.model, operator, inputs, name), name, self.kind("FLOAT"))

    def dynamic_codes(self, x: ir.Value, name: str) -> Sequence[ir.Value]:
        """Codes, scale and zero point of a DynamicQuantizeLinear."""
        node = self.ir.node("DynamicQuantizeLinear", [x], num_outputs=3)
        self._added(node, name, self.kind("UINT8"))
        for output, suffix in zip(node.outputs[1:], ("scale", "zero_point"), strict=True):
            output.name = f"{node.name}_{suffix}"
        return node.outputs

    def cast(self, value: ir.Value, to: ir.DataType | None, name: str) -> ir.Value:
        """The value in another type; itself if it has that type."""
        if to is None or value.dtype == to:
            return value
        return self.node("Cast", [value], name, {"to": int(to)}, to.name)

    def initializer(self, name: str, array: Array, kind: ir.DataType | None = None) -> ir.Value:
        """A constant."""
        return self.lazy(name, lambda: array, kind or self.ir.DataType.from_numpy(array.dtype), array.shape)

    def shared(self, name: str, array: Array) -> ir.Value:
        """A constant of quark's own that the whole graph shares under a name."""
        if name not in self._shared:
            self._shared[name] = self.initializer(name, array)
        return self._shared[name]

    def lazy(self, name: str, array: Callable[[], Array], kind: ir.DataType, shape: Sequence[int]) -> ir.Value:
        """A constant that is computed when it is written: memory holds one at a time."""
        while name in self.graph.initializers or name in self._names:
            name += "_"

        def evaluate() -> ir.TensorProtocol:
            return self.ir.tensor(np.ascontiguousarray(array()).astype(kind.numpy()), dtype=kind, name=name)

        form = self.ir.Shape(shape)
        tensor = self.ir.LazyTensor(evaluate, dtype=kind, shape=form, name=name)
        value = self.ir.Value(name=name, const_value=tensor, type=self.ir.TensorType(kind), shape=form)
        self.graph.register_initializer(value)
        return value

    def replace(self, node: ir.Node, result: ir.Value) -> None:
        """Put the nodes made since the last call in the place of `node`, whose output becomes `result`."""
        old = node.outputs[0]
        self.graph.insert_before(node, self._new)
        self._new = []
        if old.is_graph_output():
            if result.producer() is None or result.is_graph_output():
                (result,) = self._identity(node, result)
            result.name, old.name = old.name, None
        old.replace_all_uses_with(result, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)

    def _identity(self, before: ir.Node, value: ir.Value) -> Sequence[ir.Value]:
        node = self.ir.node("Identity", [value])
        self.graph.insert_before(before, [node])
        return node.outputs

    def _added(self, node: ir.Node, name: str, kind: ir.DataType) -> ir.Value:
        while name in self._names:
            name += "_"
        self._names.add(name)
        node.name, node.outputs[0].name = name, f"{name}_Output"
        node.outputs[0].type = self.ir.TensorType(kind)
        self._new.append(node)
        return node.outputs[0]
