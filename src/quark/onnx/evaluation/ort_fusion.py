"""Which quantized nodes ONNX Runtime's CPU provider computes in integers, and why not the others.

ONNX Runtime itself decides: it optimises the file, and each node of the file is looked up in what it wrote. The
reasons are rows of `ort_fusion_rules.py`.

The same as a graph to be drawn: which nodes compute in integers, which in float.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from quark.base.files import scratch_folder
from quark.onnx.evaluation.ort_fusion_nodes import (
    DECODERS,
    ENCODERS,
    QuantizedGraph,
    QuantizedNode,
    quantized_graphs,
)
from quark.onnx.evaluation.ort_fusion_rules import MOVES, explain
from quark.onnx.graph.proto_file import read_header
from quark.onnx.graph.sessions import open_session
from quark.onnx.operators import CLAMPS
from quark.report.figures import DrawnNode

__all__ = ["Fusion", "inspect_fusion"]


_INTEGER_KERNELS = frozenset(
    {"QGemm", "QAttention", "QMoE", "QEmbedLayerNormalization", "MatMulInteger", "MatMulIntegerToFloat", "ConvInteger"}
    | {"DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "MatMulNBits", "GatherBlockQuantized"}
)
"""Beside those whose name starts with QLinear."""
_NO_EFFECT = frozenset({*CLAMPS, "Identity", "Dropout"}) | MOVES
"""Operators that the runtime removes where they change nothing; others that are gone became float kernels."""
_FLOAT_DOMAIN = "com.microsoft.nchwc"
LAYOUT = frozenset({"Reshape", "Transpose", "ReorderInput", "ReorderOutput"})
SIZES = frozenset({"Shape", "Size"})
TAG = r"(\d+)\|"
"""In front of the name of each node: its index in the file."""


_INT8_LEVEL = 4
"""accuracy_level of MatMulNBits at which its input is quantized."""


@dataclass(frozen=True)
class Fusion:
    """The fate of one quantized node.

    Attributes:
        node: Its name.
        op_type: Its op type.
        kernel: Op type of what the runtime runs in its place; "" where it removed the node.
        integer: Whether that computes on integers.
        reason: Why not; "" for an integer kernel.
        advice: What to do about it.
    """

    node: str
    op_type: str
    kernel: str
    integer: bool
    reason: str = ""
    advice: str = ""


def _why_in_float(node: onnx.NodeProto) -> tuple[str, str]:
    """Why a MatMulNBits multiplies in float, and what to do; two empty texts where it multiplies in integers."""
    level = next((attribute.i for attribute in node.attribute if attribute.name == "accuracy_level"), 0)
    if level == _INT8_LEVEL:
        return "", ""
    return (
        f"Its accuracy_level is {level}: the weights are decoded, and the product is one of floats.",
        f"AccuracyLevel {_INT8_LEVEL} multiplies in int8, which costs accuracy.",
    )


def inspect_fusion(path: str | os.PathLike[str]) -> list[Fusion]:
    """The nodes that read a DequantizeLinear or are integer operators by themselves, those of bodies after the graph's.

    Args:
        path: A quantized ONNX file; an empty list where nothing in it is quantized.

    Raises:
        FormatError: It is no ONNX file, or ONNX Runtime does not load it.
    """
    file = Path(path)
    model = read_header(file)
    nodes = [(node, graph) for graph, _ in quantized_graphs(model.graph, file.parent) for node in graph.nodes]
    quantized = [i for i, (node, graph) in enumerate(nodes) if _is_quantized(node, graph)]
    if not quantized:
        return []
    fates = _Fates(_all_nodes(model.graph), _all_nodes(_optimized(model, file.parent)))
    found = []
    for index in quantized:
        node, graph = nodes[index]
        kernel, integer = fates.of(index)
        if node.op_type == "MatMulNBits":
            kernel, why = node.op_type, _why_in_float(node)
            integer = why == ("", "")
        else:
            why = ("", "") if integer else explain(QuantizedNode(node, graph))
        found.append(Fusion(node.name or f"{node.op_type}_{index}", node.op_type, kernel, integer, *why))
    return found


def _all_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes of a graph, then those of its bodies."""
    return [node for each, _ in quantized_graphs(graph) for node in each.nodes]


def _is_qdq(node: onnx.NodeProto) -> bool:
    return node.op_type in ENCODERS | DECODERS


def _is_integer(op_type: str) -> bool:
    return op_type.startswith("QLinear") or op_type in _INTEGER_KERNELS


def _is_quantized(node: onnx.NodeProto, graph: QuantizedGraph) -> bool:
    if _is_qdq(node):
        return False
    return _is_integer(node.op_type) or any(graph.decoder(name) is not None for name in node.input)


def _optimized(model: onnx.ModelProto, folder: Path) -> onnx.GraphProto:
    """The graph as the runtime runs it; each node that survived starts with the number of its original."""
    tagged = onnx.ModelProto()
    tagged.CopyFrom(model)
    for index, node in enumerate(_all_nodes(tagged.graph)):
        node.name = f"{index}|{node.name}"
    with scratch_folder(Path(tempfile.gettempdir())) as place:
        target = place / "optimized.onnx"
        open_session(tagged, folder, optimized=target)
        return read_header(target).graph


class _Fates:
    """Looks nodes of the file up among those of the optimised one; bodies may have become part of the graph."""

    def __init__(self, original: Sequence[onnx.NodeProto], optimized: Sequence[onnx.NodeProto]) -> None:
        self.nodes = original
        self.decoded = {node.output[0] for node in optimized if node.op_type in DECODERS}
        self.survivors: dict[int, onnx.NodeProto] = {}
        for node in optimized:
            match = re.match(TAG, node.name)
            if match and not _is_qdq(node):
                self.survivors.setdefault(int(match.group(1)), node)
        self.made = {name: node for node in optimized if not _is_qdq(node) for name in node.output}
        self.producers = {name: i for i, node in enumerate(self.nodes) for name in node.output}
        self.readers: dict[str, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for name in node.input:
                self.readers.setdefault(name, []).append(index)

    def of(self, index: int) -> tuple[str, bool]:
        """Op type of the kernel, and whether it computes on integers."""
        op_type, survivor = self.nodes[index].op_type, self._survivor(index)
        if _is_integer(op_type):
            return (survivor.op_type if survivor is not None and _is_integer(survivor.op_type) else op_type), True
        if survivor is None:
            return ("", True) if op_type in _NO_EFFECT else (op_type, False)
        integer = survivor.domain != _FLOAT_DOMAIN and not self.decoded & set(survivor.input)
        return survivor.op_type, _is_integer(survivor.op_type) or integer

    def _maker(self, name: str) -> onnx.NodeProto | None:
        """Return the node that computes a tensor of the optimised graph, before any change of layout that was added."""
        node = self.made.get(name)
        while node is not None and node.op_type in LAYOUT and not re.match(TAG, node.name):
            node = self.made.get(node.input[0])
        return node

    def _survivor(self, index: int) -> onnx.NodeProto | None:
        """The node itself, or that into which it was merged: what now makes its output, or reads it."""
        if index in self.survivors:
            return self.survivors[index]
        queue = [index]
        for current in queue:
            for name in self.nodes[current].output:
                readers = self.readers.get(name, [])
                encoded = [self.nodes[i].output[0] for i in readers if self.nodes[i].op_type in ENCODERS]
                made = next(filter(None, map(self._maker, (name, *encoded))), None)
                if made is not None:
                    return made
                for reader in readers:
                    if reader in self.survivors:
                        return self.survivors[reader]
                    if reader not in queue and not _is_qdq(self.nodes[reader]):
                        queue.append(reader)
        # The runtime gives int8 tensors new names: then it is the node before, where no Q/DQ is between.
        before = [self.producers[name] for name in self.nodes[index].input if name in self.producers]
        return next((self._survivor(i) for i in before if not _is_qdq(self.nodes[i])), None)


# The graph of kernels -------------------------------------------------------------------------------------------------


KINDS = ("integer", "quantized, but float", "float")
"""The kinds of nodes, which `DrawnNode.kind` counts."""


def kernel_graph(path: Path, fusion: list[Fusion]) -> list[DrawnNode]:
    """The nodes of a file that compute, in order: edges lead through Q/DQ nodes, constants are left out.

    Args:
        path: An ONNX file.
        fusion: What `inspect_fusion` says of it.
    """
    graph = read_header(path).graph
    integer = {row.node: row.integer for row in fusion}
    makers: dict[str, int] = {}  # tensor -> the drawn node that its values come from
    sizes = _of_sizes(graph)
    drawn: list[DrawnNode] = []
    for index, node in enumerate(graph.node):
        sources = tuple(dict.fromkeys(makers[name] for name in _names_read(node) if name in makers))
        if node.op_type in ENCODERS | DECODERS:
            makers.update({name: sources[0] for name in node.output if sources})
            continue
        if node.op_type == "Constant":
            continue
        name = node.name or f"{node.op_type}_{index}"
        kind = 2 if name not in integer else 0 if integer[name] else 1
        makers.update(dict.fromkeys(filter(None, node.output), len(drawn)))
        drawn.append(DrawnNode(node.op_type, node.name, kind, sources, not sizes.isdisjoint(node.output)))
    return drawn


def _of_sizes(graph: onnx.GraphProto) -> set[str]:
    """The tensors whose values follow from the sizes of tensors and from constants alone."""
    constants, found = {"", *(tensor.name for tensor in graph.initializer)}, set[str]()
    for node in graph.node:
        names = _names_read(node)
        if node.op_type == "Constant":
            constants.update(node.output)
        elif node.op_type in SIZES or (not found.isdisjoint(names) and {*names} - found <= constants):
            found.update(filter(None, node.output))
    return found


def _names_read(node: onnx.NodeProto) -> list[str]:
    """Return what a node reads, what its bodies read from outside included."""
    names = list(node.input)
    for attribute in node.attribute:
        for inner in attribute.g.node if attribute.HasField("g") else ():
            names += _names_read(inner)
    return names
