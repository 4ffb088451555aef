"""Placement: what is decided about one graph before any data is seen."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import onnx_ir as ir

from quark.core.spec import TensorSpec

FACTOR = "quark.factor"
"""In `meta` of a Mul: its float factor is part of the node before it, whose output it reads before that is rounded."""

Operand = tuple[ir.Node, int]
"""(node, input index)."""


@dataclass
class Placement:
    """Which tensors of a graph are quantized, and with which spec.

    Attributes:
        activations: Tensor -> spec.
        shared: Tensor -> the tensor whose scale it uses; absent for a class of its own.
        weights: (node, input index) -> spec.
        biases: (node, input index) -> index of the weight.
        added_biases: (Add, input index) of a constant that is the bias of a MatMul -> the MatMul.
        specific: Nodes whose activations have specs of their own, not the global ones: these win over their
            neighbours'.
        reads: (node, input index) -> the spec that the node asks for, whatever the tensor gets.
        half: Whether the floats of the model are float16.
        dynamic: Nodes whose input is quantized as it comes.
        nodes: The quantized nodes.
    """

    activations: dict[ir.Value, TensorSpec] = field(default_factory=dict)
    shared: dict[ir.Value, ir.Value] = field(default_factory=dict)
    weights: dict[Operand, TensorSpec] = field(default_factory=dict)
    biases: dict[Operand, int] = field(default_factory=dict)
    added_biases: dict[Operand, ir.Node] = field(default_factory=dict)
    specific: set[ir.Node] = field(default_factory=set)
    reads: dict[Operand, TensorSpec] = field(default_factory=dict)
    half: bool = False
    dynamic: list[ir.Node] = field(default_factory=list)
    nodes: list[ir.Node] = field(default_factory=list)

    @property
    def weights_of_biases(self) -> dict[Operand, Operand]:
        """Each int32 bias -> the weight whose scale it has a part of."""
        weights = {(node, index): (node, weight) for (node, index), weight in self.biases.items()}
        return weights | {operand: (matmul, 1) for operand, matmul in self.added_biases.items()}

    def quantized(self, values: Iterable[ir.Value | None]) -> list[ir.Value]:
        """Those of these tensors that are."""
        return [value for value in values if value is not None and value in self.activations]

    def root(self, value: ir.Value) -> ir.Value:
        """The tensor that stands for the class of `value`."""
        while value in self.shared:
            value = self.shared[value]
        return value

    def join(self, one: ir.Value, other: ir.Value) -> None:
        """Give two tensors one scale; the class is represented by the first."""
        one, other = self.root(one), self.root(other)
        if one is not other:
            self.shared[other] = one

    def leave_in_float(self, values: Collection[ir.Value]) -> None:
        """Take tensors out, with all that share their scale, and constants of nodes."""
        roots = {self.root(value) for value in values}
        for value in [value for value in self.activations if self.root(value) in roots]:
            del self.activations[value]
        for node, index in [operand for operand in self.weights if operand[0].inputs[operand[1]] in values]:
            del self.weights[node, index]

    def is_float(self, value: ir.Value, if_unknown: bool = True) -> bool:
        """Return True where a value is a tensor of the model's float type; `if_unknown` where it has no type."""
        if value.type is None:
            return if_unknown
        # A sequence of tensors has an element type too.
        dtype = ir.DataType.FLOAT16 if self.half else ir.DataType.FLOAT
        return isinstance(value.type, ir.TensorType) and value.dtype is dtype

    def computes_other_float(self, node: ir.Node) -> bool:
        """Return True where a node computes in another float type than the model's, for which there are no scales."""
        values = [value for value in (*node.inputs, *node.outputs) if value is not None]
        others = [value.dtype for value in values if value.dtype is not None and not self.is_float(value)]
        return any(dtype.is_floating_point() for dtype in others)
