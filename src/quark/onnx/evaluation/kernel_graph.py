"""The graph of a file as its kernels run it on a CPU: which nodes compute in integers, which in float."""

from __future__ import annotations

from pathlib import Path

import onnx

from quark.onnx.evaluation.ort_fusion import Fusion
from quark.onnx.evaluation.ort_fusion_nodes import DECODERS, ENCODERS
from quark.onnx.graph.proto_file import read_header
from quark.report.figures import DrawnNode

KINDS = ("integer", "quantized, but float", "float")
"""What `DrawnNode.kind` counts."""


def kernel_graph(path: Path, fusion: list[Fusion]) -> list[DrawnNode]:
    """The nodes of a file that compute, in order: edges lead through Q/DQ nodes, constants are left out.

    Args:
        path: An ONNX file.
        fusion: What `inspect_fusion` says of it.
    """
    graph = read_header(path).graph
    integer = {row.node: row.integer for row in fusion}
    makers: dict[str, int] = {}  # tensor -> the drawn node that its values come from
    drawn: list[DrawnNode] = []
    for index, node in enumerate(graph.node):
        sources = tuple(dict.fromkeys(makers[name] for name in _read(node) if name in makers))
        if node.op_type in ENCODERS | DECODERS:
            makers.update({name: sources[0] for name in node.output if sources})
            continue
        if node.op_type == "Constant":
            continue
        name = node.name or f"{node.op_type}_{index}"
        kind = 2 if name not in integer else 0 if integer[name] else 1
        makers.update(dict.fromkeys(filter(None, node.output), len(drawn)))
        drawn.append(DrawnNode(f"{node.op_type} {node.name}".rstrip(), kind, sources))
    return drawn


def _read(node: onnx.NodeProto) -> list[str]:
    """What a node reads, what its bodies read from outside included."""
    names = list(node.input)
    for attribute in node.attribute:
        for inner in attribute.g.node if attribute.HasField("g") else ():
            names += _read(inner)
    return names
