"""Node groups: which nodes of a float model the runtime computes together, there or in the quantized model.

    Conv, Relu                float: one convolution          integers: one QLinearConv
    Sigmoid, Mul              float: one QuickGelu            integers: QLinearSigmoid, QLinearMul

One kernel has one time, so that its nodes stay together. A change of layout before or after a kernel is a part of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from quark.onnx.graph.edit import read_once
from quark.onnx.operators import QDQ
from quark.onnx.search.latency.kernels import BLOCKED, TOKEN, TimedKernel

LAYOUT = ("ReorderInput", "ReorderOutput", "Transpose")
_BLOCKED_SUFFIX = "_nchwc"
"""The end that the name of a tensor gets as that of the kernel which makes it in the blocked layout."""


@dataclass(frozen=True)
class Side:
    """A model as it runs, in float or in integers.

    Attributes:
        kernels: What runs for it.
        seconds: Name of a kernel -> its time.
        owners: Name of a kernel -> the nodes of the float model that it computes; Q/DQ compute none.
        laid_out: Tensors of the float model that are brought into another layout, or out of it.
        conversions: (QuantizeLinear or DequantizeLinear, tensor of the float model) -> the time of all that run for it.
    """

    kernels: Sequence[TimedKernel]
    seconds: Mapping[str, float]
    owners: Mapping[str, frozenset[str]]
    laid_out: frozenset[str]
    conversions: Mapping[tuple[str, str], float]

    def total(self) -> float:
        """Seconds of all kernels."""
        return sum(self.seconds[kernel.name] for kernel in self.kernels)

    def of_nodes(self) -> tuple[tuple[str, float], ...]:
        """(node of the float model, its share of the seconds of the kernels that compute it), by name."""
        found: dict[str, float] = {}
        for kernel in self.kernels:
            for node in (owners := self.owners.get(kernel.name, frozenset())):
                found[node] = found.get(node, 0.0) + self.seconds[kernel.name] / len(owners)
        return tuple(sorted(found.items()))


@dataclass
class NodeGroups:
    """A partition of the nodes of a model, by name.

    Attributes:
        parents: Node -> another of its group; absent for the one that stands for the group.
    """

    parents: dict[str, str] = field(default_factory=dict)

    def find(self, name: str | None) -> str:
        """The node that stands for the group of another."""
        found = name or ""
        while found in self.parents:
            found = self.parents[found]
        return found

    def join(self, names: Iterable[str | None]) -> None:
        """Make one group of those of some nodes."""
        first, *others = sorted({self.find(name) for name in names})
        self.parents.update(dict.fromkeys(others, first))

    def seconds(self, side: Side) -> dict[str, float]:
        """The time of each group, without conversions."""
        found: dict[str, float] = defaultdict(float)
        for kernel, nodes in side.owners.items():
            found[self.find(min(nodes))] += side.seconds[kernel]
        return found

    def in_other_layout(self, side: Side) -> set[str]:
        """The groups whose kernels read and write another layout than ONNX's."""
        kernels = (kernel for kernel in side.kernels if kernel.other_layout)
        return {self.find(name) for kernel in kernels for name in side.owners.get(kernel.name, ())}


def side_of(
    model: ir.Model, kernels: Sequence[TimedKernel], seconds: Mapping[str, float], nodes: Iterable[str]
) -> Side:
    """Find for each kernel of a model the nodes that it computes.

    Args:
        model: The float one, or the one with Q/DQ.
        kernels: What runs for it.
        seconds: Name of a kernel -> its time.
        nodes: Names of the nodes of the float model.
    """
    graph, laid_out = _Named(model, set(nodes)), set[str]()
    computed: dict[str, frozenset[str]] = {}
    conversions: dict[tuple[str, str], float] = defaultdict(float)
    for kernel in kernels:
        if kernel.op_type not in QDQ:
            laid_out |= graph.laid_out(kernel)
            computed[kernel.name] = graph.computed(kernel)
        elif converted := graph.tensors([*kernel.outputs, *kernel.inputs])[:1]:
            conversions[kernel.op_type, converted[0]] += seconds[kernel.name]
    return Side(kernels, seconds, _with_helpers(kernels, computed), frozenset(laid_out), conversions)


class _Named:
    """Finds tensors and nodes of the float model by the names that kernels have.

    Args:
        model: The float one, or the one with Q/DQ.
        nodes: Names of the nodes of the float model.
    """

    def __init__(self, model: ir.Model, nodes: set[str]) -> None:
        self._nodes = nodes
        self._values = {value.name or "": value for node in model.graph for value in node.outputs}

    def tensors(self, names: Iterable[str]) -> list[str]:
        """The tensors of the float model whose values some have; those that no node makes are left out."""
        return [_float_tensor(self._values[name]).name or "" for name in names if name in self._values]

    def laid_out(self, kernel: TimedKernel) -> set[str]:
        """The tensors that a change of layout is for; none of another kernel."""
        changes = kernel.op_type in LAYOUT and TOKEN.sub("", kernel.name) not in self._nodes
        return set(self.tensors([*kernel.inputs, *kernel.outputs])) if changes else set()

    def computed(self, kernel: TimedKernel) -> frozenset[str]:
        """The nodes that a kernel computes, by its name and by what it makes."""
        made = [_float_tensor(self._values[name]) for name in tensors(kernel) if name in self._values]
        writers = {node.name or "" for value in made if (node := value.producer()) is not None}
        return frozenset(self._nodes & {TOKEN.sub("", kernel.name), *writers})


def _with_helpers(kernels: Sequence[TimedKernel], computed: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """The nodes of each kernel; one that computes none prepares the input of a kernel that does, or of such a one."""
    owners = {name: nodes for name, nodes in computed.items() if nodes}
    readers = {name: kernel.name for kernel in reversed(kernels) for name in kernel.inputs}
    for kernel in reversed(kernels):
        if kernel.name in computed and kernel.name not in owners:
            # Of several the first: that makes no group of them.
            found = next((owners[readers[name]] for name in kernel.outputs if readers.get(name) in owners), None)
            if found is not None:
                owners[kernel.name] = frozenset({min(found)})
    return owners


def group_nodes(model: ir.Model, candidates: set[str], in_float: Side, in_integers: Side) -> NodeGroups:
    """The groups of the nodes of the float model.

    Args:
        model: The float model.
        candidates: Names of the nodes that may be computed in integers.
        in_float, in_integers: How it runs.
    """
    groups = NodeGroups()
    for names in (*in_float.owners.values(), *in_integers.owners.values()):
        groups.join(names)
    computed = {name for names in in_float.owners.values() for name in names}
    for node in model.graph:
        # What has no kernel of its own is a part of that of its only reader.
        output = node.outputs[0]
        if node.name in candidates and node.name not in computed and read_once(output):
            reader = next(iter(output.uses())).node
            if reader.graph is node.graph:
                groups.join([node.name, reader.name])
    return groups


def tensors(kernel: TimedKernel) -> list[str]:
    """The tensors that a kernel makes; first, of one in the blocked layout, what ONNX calls the same values."""
    name = TOKEN.sub("", kernel.name)
    blocked = kernel.domain == BLOCKED and name.endswith(_BLOCKED_SUFFIX)
    return [*([name.removesuffix(_BLOCKED_SUFFIX)] if blocked else []), *kernel.outputs]


def _float_tensor(value: ir.Value) -> ir.Value:
    """The tensor whose values a tensor after Q/DQ holds."""
    while (node := value.producer()) is not None and node.op_type in QDQ and node.inputs[0] is not None:
        value = node.inputs[0]
    return value
