"""Puts the quantizers of a plan into the graph: FakeQuantize modules, called between the operators.

A tensor has one quantizer, whoever reads it. Tensors that must have one scale share the module itself, so that it
observes them all and a scale exists once: the inputs of Add, inputs and output of Concat and pooling, the inputs of
all calls of a layer, and both sides of an operator that only moves values. That holds for static scales per tensor;
a scale of another kind belongs to one tensor.
"""

from __future__ import annotations

from torch import fx

from quark.core.granularity import PerTensor
from quark.core.spec import TensorSpec
from quark.torch.graph.operators import (
    MOVING_OPERATORS,
    activations_of,
    fused_end,
    is_call,
    is_float,
    parameter_of,
    source_of,
)
from quark.torch.graph.plan import GraphPlan, QuantizableOperator
from quark.torch.layers.fake_quant import FakeQuantize

Parameters = dict[str, tuple[str, FakeQuantize]]
"""Path of the quantizer of a weight or bias -> path of that parameter, and the quantizer."""


class QuantizerInserter:
    """Inserts quantizers into one graph.

    Args:
        model: Changed in place: its graph and its modules.
        plan: What to insert.

    Attributes:
        activations: Path of a quantizer -> quantizer.
        parameters: The same of weights and biases.
    """

    def __init__(self, model: fx.GraphModule, plan: GraphPlan) -> None:
        self.model, self.plan = model, plan
        self.activations: dict[str, FakeQuantize] = {}
        self.parameters: Parameters = {}
        self._classes = _equal_scales(model.graph, [plan.operators[name] for name in plan.layers])
        self._shared: dict[tuple[fx.Node, TensorSpec], str] = {}
        self._quantized: dict[fx.Node, str] = {}
        heads = [n for n in model.graph.nodes if n.op == "placeholder" or (n.op == "call_module" and not n.users)]
        self._after_arguments = heads[-1:]

    def run(self) -> None:
        """Insert all of them: parameters, then outputs, so that who reads an output finds it quantized."""
        chosen = [(self.plan.operators[name], spec) for name, spec in self.plan.layers.items()]
        # Read before anything is inserted: a quantized weight is no get_attr node any more.
        reads = []
        for operator, spec in chosen:
            if spec.input is not None:
                reads += [(operator, spec.input, node, activations_of(node)) for node in operator.nodes]
        for operator, spec in chosen:
            for role, position in (("weight", operator.kind.weight), ("bias", operator.kind.bias)):
                tensor = getattr(spec, role)
                if tensor is not None and position is not None:
                    self._parameter(operator, role, position, tensor)
        for operator, spec in chosen:
            for node in operator.nodes if spec.output else ():
                self._output(operator, spec.output, fused_end(node))  # type: ignore[arg-type]
        for operator, tensor, node, arguments in reads:
            for index, argument in enumerate(arguments):
                self._input(operator, tensor, node, argument, index)
        self.model.graph.lint()
        self.model.recompile()

    def _parameter(self, operator: QuantizableOperator, role: str, position: int, spec: TensorSpec) -> None:
        path = f"{operator.name}.{role}_quantizer"
        for node in operator.nodes:
            source = parameter_of(node, position)
            if source is None:
                continue
            called = next((user for user in source.users if user.target == path), None)
            if called is None:
                if path not in self.parameters:
                    self.parameters[path] = (str(source.target), self._module(path, spec))
                called = self._call(path, source)
            node.args = (*node.args[:position], called, *node.args[position + 1 :])

    def _output(self, operator: QuantizableOperator, spec: TensorSpec, tensor: fx.Node) -> None:
        path = self._path(operator, "output", spec, tensor, 0)
        called = self._call(path, tensor)
        tensor.replace_all_uses_with(called, delete_user_cb=lambda user: user is not called)
        self._quantized[called] = path

    def _input(
        self, operator: QuantizableOperator, spec: TensorSpec, node: fx.Node, tensor: fx.Node, index: int
    ) -> None:
        # The tensor of the original graph may have an output quantizer by now.
        quantized = next((u for u in tensor.users if u in self._quantized and u in node.all_input_nodes), None)
        read = quantized or tensor
        path = self._path(operator, "input", spec, tensor, index)
        if self._quantized.get(source_of(read)) == path:
            return
        called = next((user for user in read.users if self._quantized.get(user) == path), None)
        if called is None:
            called = self._call(path, read)
            self._quantized[called] = path
        node.replace_input_with(read, called)

    def _path(self, operator: QuantizableOperator, role: str, spec: TensorSpec, tensor: fx.Node, index: int) -> str:
        """The quantizer of a tensor: that of its class, or a new one with the name of who asks first."""
        key = (self._classes.get(tensor, tensor) if shares(spec) else tensor, spec)
        if key not in self._shared:
            path = f"{operator.name}.{role}_{index}_quantizer" if index else f"{operator.name}.{role}_quantizer"
            while path in self.activations:
                index += 1
                path = f"{operator.name}.{role}_{index}_quantizer"
            self._shared[key] = path
            self.activations[path] = self._module(path, spec)
        return self._shared[key]

    def _module(self, path: str, spec: TensorSpec) -> FakeQuantize:
        quantizer = FakeQuantize(spec)
        self.model.add_submodule(path, quantizer)
        return quantizer

    def _call(self, path: str, tensor: fx.Node) -> fx.Node:
        # Arguments come first, with the check of their shapes.
        (place,) = self._after_arguments if tensor.op == "placeholder" else [tensor]
        with self.model.graph.inserting_after(place):
            called = self.model.graph.call_module(path, (tensor,))
        called.meta = {key: tensor.meta[key] for key in ("val", "nn_module_stack") if key in tensor.meta}
        return called


def shares(spec: TensorSpec) -> bool:
    """Return True where one scale can serve several tensors."""
    return not spec.dynamic and isinstance(spec.granularity, PerTensor)


def _equal_scales(graph: fx.Graph, operators: list[QuantizableOperator]) -> dict[fx.Node, fx.Node]:
    """Tensor -> the tensor that stands for all that have its scale."""
    parent: dict[fx.Node, fx.Node] = {}

    def find(tensor: fx.Node) -> fx.Node:
        while tensor in parent:
            tensor = parent[tensor]
        return tensor

    def join(tensors: list[fx.Node]) -> None:
        for other in tensors[1:]:
            first, second = find(tensors[0]), find(other)
            if first is not second:
                parent[second] = first

    for node in graph.nodes:
        if is_call(node, *MOVING_OPERATORS) and is_float(node):
            join([node.args[0], node])
    for operator in operators:
        for node in operator.nodes:
            if operator.kind.same_scale is not None:
                outputs = [fused_end(node)] if operator.kind.same_scale == "all" else []
                join([*activations_of(node), *outputs])
        for calls in zip(*map(activations_of, operator.nodes), strict=False):
            join(list(calls))
    return {tensor: find(tensor) for tensor in parent}
