"""The dataflow graph of one forward of any model: what made each tensor, and what read it.

A node of the graph is one call of a leaf module (a linear layer, a norm, an activation) or one tensor operation outside
of those; `quark.torch.model.record_forward` writes it down while the model runs.

    graph = record(model, lambda: model(ids))
    graph.groups()                   # [("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", ...), ...]
    node = graph.calls["layers.0.self_attn.o_proj"][0]
    graph.sources(node.inputs[0])    # the nearest layers before it: q_proj, k_proj, v_proj
    graph.addition_chains()[0].writers       # what is added to the residual stream
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

MOVING_FUNCTIONS = {
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone"),
    *("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "T", "mT"),
    *("split", "chunk", "unbind", "tensor_split", "narrow", "select", "index_select", "__getitem__"),
    *("expand", "broadcast_to", "repeat", "repeat_interleave"),
}
"""Operations that only move, choose or repeat elements."""

COPIES = {
    *("to", "float", "double", "half", "bfloat16", "type", "type_as"),
    *("detach", "data", "alias", "dropout", "contiguous", "clone"),
}
"""Operations whose result is their first operand, rounded at most."""

SUMS = {
    *("add", "sub", "__add__", "__radd__", "__sub__", "__iadd__", "__isub__"),
    *("add_", "sub_", "index_add", "index_add_"),
}
JOINS = {"cat", "concat", "concatenate"}
TOTALS = {"sum"}
"""Operations that add up along axes."""
PRODUCTS = {"mul", "div", "__mul__", "__rmul__", "__truediv__", "__imul__", "mul_", "div_"}


@dataclass(frozen=True)
class RecordedTensor:
    """One floating-point tensor of the forward; its place in `Trace.values` is its name.

    Attributes:
        shape, dtype: Of the tensor.
        node: Index of the node that made it; None for an input, a parameter, a constant.
        parameter: Full name, if it is a parameter of the model.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    node: int | None = None
    parameter: str | None = None


@dataclass(frozen=True)
class Node:
    """One step of the forward.

    Attributes:
        index: Place in `Trace.nodes`; the order of execution.
        kind: Name of the operation ("mul", "softmax") or class of the leaf module ("Linear", "LlamaRMSNorm").
        module: Full name of the leaf module; None for a plain operation.
        scope: Full name of the innermost module around it.
        inputs, outputs: Values read and made, in the order of the arguments. A module reads only what it used.
        move: For `MOVING_FUNCTIONS`: the same rearrangement of another tensor of the input's shape.
        total: For `TOTALS`: the same sum of another tensor of the input's shape.
    """

    index: int
    kind: str
    module: str | None
    scope: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    move: Callable[[torch.Tensor], Any] | None = field(default=None, compare=False, repr=False)
    total: Callable[[torch.Tensor], Any] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class AdditionChain:
    """All values that one chain of additions carries, such as the residual stream.

    Attributes:
        values: Those values.
        writers: Nodes (mostly leaf modules) whose results are added to it or start it.
        readers: Nodes that read it and lead off it: norms, linear layers.
    """

    values: frozenset[int]
    writers: tuple[Node, ...]
    readers: tuple[Node, ...]


@dataclass(frozen=True)
class Trace:
    """The recorded forward.

    Attributes:
        values: All floating-point tensors; a value is named by its index.
        nodes: In the order of execution.
        linears: Full names of all linear layers of the model, in its order, called or not.
        spans: Full name of a module with children -> (values it was called with, values it returned).
    """

    values: tuple[RecordedTensor, ...]
    nodes: tuple[Node, ...]
    linears: tuple[str, ...]
    spans: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]

    @cached_property
    def calls(self) -> dict[str, list[Node]]:
        """Full name of a leaf module -> its calls."""
        calls = defaultdict(list)
        for node in self.nodes:
            if node.module is not None:
                calls[node.module].append(node)
        return dict(calls)

    @cached_property
    def uncalled(self) -> tuple[str, ...]:
        """Linear layers that read nothing in this forward: experts without tokens."""

        def reads(node: Node) -> bool:
            return 0 not in self.values[node.inputs[0]].shape

        return tuple(name for name in self.linears if not any(map(reads, self.calls.get(name, []))))

    @cached_property
    def _readers(self) -> dict[int, list[Node]]:
        readers = defaultdict(list)
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                readers[value].append(node)
        return dict(readers)

    def producer(self, value: int) -> Node | None:
        """The node that made a value."""
        index = self.values[value].node
        return None if index is None else self.nodes[index]

    def _producers(self, values: Iterable[int]) -> list[Node]:
        """The nodes that made the values; inputs, parameters and constants have none."""
        indices = [self.values[value].node for value in values]
        return [self.nodes[index] for index in indices if index is not None]

    def readers(self, value: int) -> list[Node]:
        """The nodes that read a value."""
        return self._readers.get(value, [])

    def origin(self, value: int) -> int:
        """The value of which this one holds the same channels: reshapes, casts and choices of rows undone."""
        while (node := self.producer(value)) is not None and self._keeps_channels(node, value):
            value = node.inputs[0]
        return value

    def groups(self, names: Iterable[str] | None = None) -> list[tuple[str, ...]]:
        """Linear layers (all, or those named) that read the same channels: q/k/v, gate/up of every expert."""
        groups: dict[int, list[str]] = defaultdict(list)
        for name in self.linears if names is None else names:
            for node in self.calls.get(name, [])[: name not in self.uncalled]:
                groups[self.origin(node.inputs[0])].append(name)
        return [tuple(group) for group in groups.values()]

    def sources(self, value: int) -> list[Node]:
        """The nearest nodes with parameters that a value was computed from: linear layers, norms, embeddings."""
        return self._nearest(self._producers([value]), back=True)

    def targets(self, value: int) -> list[Node]:
        """The nearest nodes with parameters that a value leads to."""
        return self._nearest(self.readers(value), back=False)

    def _nearest(self, start: list[Node], back: bool) -> list[Node]:
        nearest, seen, todo = {}, set(), list(start)
        while todo:
            node = todo.pop()
            if node.index in seen:
                continue
            seen.add(node.index)
            if self.has_parameter(node):
                nearest[node.index] = node
            elif back:
                todo += self._producers(node.inputs)
            else:
                todo += [reader for value in node.outputs for reader in self.readers(value)]
        return [nearest[index] for index in sorted(nearest)]

    def has_parameter(self, node: Node) -> bool:
        """Return True where a node computes with a parameter of the model."""
        return any(self.values[self.origin(value)].parameter for value in node.inputs)

    def addition_chains(self) -> list[AdditionChain]:
        """Chains of additions, the longest first. A model whose norms stand before its layers has one long chain, its
        residual stream; one whose norms stand on the stream (BERT) has a short chain for each.
        """
        links, roots = self._links
        chains: dict[int, set[int]] = defaultdict(set)
        for value, root in enumerate(roots):
            chains[root].add(value)
        sums = Counter(roots[self.nodes[i].outputs[0]] for i in links if self.nodes[i].kind in SUMS)
        return [self._chain(chains[root], links) for root, _ in sums.most_common()]

    def addition_chain(self, value: int) -> AdditionChain:
        """The chain of additions that holds a value, if only the value itself."""
        links, roots = self._links
        return self._chain({v for v, root in enumerate(roots) if root == roots[value]}, links)

    @cached_property
    def _links(self) -> tuple[set[int], list[int]]:
        """Nodes that pass a chain on, and for each value one that stands for its chain."""
        parent = list(range(len(self.values)))

        def root(value: int) -> int:
            while parent[value] != value:
                parent[value] = value = parent[parent[value]]
            return value

        links = set()
        for node in self.nodes:
            for value, output in self._carried(node):
                links.add(node.index)
                parent[root(value)] = root(output)
        return links, [root(value) for value in range(len(self.values))]

    def _chain(self, values: set[int], links: set[int]) -> AdditionChain:
        writers = {node.index: node for node in self._producers(values) if node.index not in links}
        read = {n.index: n for v in values for n in self.readers(v)}
        readers = [i for i in sorted(read) if i not in links or not values.issuperset(read[i].outputs)]
        return AdditionChain(
            frozenset(values), tuple(writers[i] for i in sorted(writers)), tuple(read[i] for i in readers)
        )

    def _carried(self, node: Node) -> list[tuple[int, int]]:
        """Return the streams that a node passes on, as (input, output): of sums, copies, joined rows, token factors."""
        if node.module is not None or not node.outputs:
            return []
        if node.kind in SUMS | PRODUCTS | JOINS:
            return [(value, node.outputs[0]) for value in self._operands(node)]
        if node.total is not None:
            return [(node.inputs[0], node.outputs[0])] if self._adds_rows(node) else []
        return [(node.inputs[0], output) for output in node.outputs if self._keeps_channels(node, output)]

    def _operands(self, node: Node) -> list[int]:
        """The operands that a sum, a product or a join passes on."""
        width = self.values[node.outputs[0]].shape[-1:]
        same = [value for value in node.inputs if self.values[value].shape[-1:] == width and width]
        if node.kind in SUMS:
            return same
        # A product of two, and what joins anything else, is no longer of these channels.
        return same if len(same) == (1 if node.kind in PRODUCTS else len(node.inputs)) else []

    def _adds_rows(self, node: Node) -> bool:
        """Return True where a sum along axes leaves the channels (last axis), each at its place."""
        assert node.total is not None
        shape = self.values[node.inputs[0]].shape
        channels = torch.arange(shape[-1])
        added = node.total(channels.expand(shape))
        if added.shape[-1:] != shape[-1:] or not added.numel():
            return False
        return bool((added == channels * (math.prod(shape) // added.numel())).all())

    def _keeps_channels(self, node: Node, output: int) -> bool:
        """Return True where an output holds the channels (last axis) of the first input, each at its place."""
        if node.module is not None or not node.inputs:
            return False
        if node.kind in COPIES:
            return True
        shape = self.values[node.inputs[0]].shape
        if node.move is None or not shape or self.values[output].shape[-1:] != shape[-1:]:
            return False
        channels = torch.arange(shape[-1])
        moved = tree_leaves(node.move(channels.expand(shape)))[node.outputs.index(output)]
        # Another shape: it read something else too, and nothing is known of its channels.
        return moved.shape == self.values[output].shape and bool((moved == channels).all())
