"""short_names: what quantization added to a small model gets names that are shorter than those of the model's tensors.

    {tensor}_QuantizeLinear, {tensor}_DequantizeLinear_Output, {tensor}_scale  ->  q7_QuantizeLinear, q7_d, q7_scale

Some exporters write names of a hundred letters, which each Q/DQ pair repeats six times: in a model of few weights these
are most of the file. Tensors, nodes and constants of the model itself keep their names.
"""

from __future__ import annotations

import re

import onnx_ir as ir

from quark.onnx.graph.model_file import to_proto
from quark.onnx.operators import QDQ
from quark.onnx_ops.graph_writer import free_name
from quark.onnx_ops.saving import weight_bytes

_ADDED = re.compile(r"(.+)_((?:De)?[Qq]uantizeLinear\w*|Clip|Mul|inverse_scale|scale|zero_point|quantized\w*)")
"""Tensor and role, of a name that `qdq_nodes.py` or `constants.py` gave."""
OUTPUTS = {"QuantizeLinear_Output": "q", "DequantizeLinear_Output": "d"}
ROLES = (*QDQ, "QuantizeDequantize")
MOST_LARGER, MOST_BYTES = 1.1, 1 << 24
"""Times the bytes of the float model; and bytes of a model in which names weigh nothing."""
SHORT = 8
"""Letters of a tensor's name that nothing is saved by."""


def shorten_where_larger(model: ir.Model, before: int) -> None:
    """Give short names to what was added, where the file would be larger than that of the float model by a tenth.

    Args:
        model: A quantized model, changed in place.
        before: Bytes of the float one.
    """
    if before < MOST_BYTES and weight_bytes(model) < MOST_BYTES and to_proto(model).ByteSize() > MOST_LARGER * before:
        shorten_names(model)


def shorten_names(model: ir.Model) -> int:
    """Rename the nodes that quantize and decode, what they give and their constants; return how many tensors it is of.

    Args:
        model: A quantized model, changed in place; outputs of the graph keep their names.
    """
    graph, names = model.graph, _ShortNames(model.graph)
    for node in filter(_added, graph):
        for value in node.outputs:
            if value.name and not value.is_graph_output():
                value.name = names.of(value.name)
        for source in node.inputs[1:]:
            if (
                source is not None
                and source.name in graph.initializers
                and all(_added(use.node) for use in source.uses())
            ):
                source.name = names.of(source.name or "")
        node.name = names.of(node.name or "")
    return len(names.tokens)


class _ShortNames:
    """Names in place of long ones.

    Attributes:
        used: All names of a graph.
        tokens: Name of a tensor of the model -> what stands for it.
    """

    def __init__(self, graph: ir.Graph) -> None:
        nodes = list(graph.all_nodes())
        values = [*graph.inputs, *(value for node in nodes for value in node.outputs)]
        names = [*graph.initializers, *(node.name for node in nodes), *(value.name for value in values)]
        self.used, self.tokens = {name for name in names if name}, dict[str, str]()

    def of(self, name: str) -> str:
        """The short form of a name that was added for a tensor; others stay."""
        found = _ADDED.fullmatch(name)
        if found is None or len(found[1]) <= SHORT:
            return name
        token = self.tokens.setdefault(found[1], f"q{len(self.tokens)}")
        role = found[2]
        for long, letter in OUTPUTS.items():
            role = letter + role.removeprefix(long) if role.startswith(long) else role
        new = free_name(f"{token}_{role}", self.used)
        self.used.add(new)
        return new


def _added(node: ir.Node) -> bool:
    """Return True where a node is one of a pair: by its operator, or by a name that only these have."""
    if any(node.op_type.endswith(role) for role in ROLES):
        return True
    name, output = node.name or "", node.outputs[0].name or ""
    return (
        node.op_type in ("Cast", "Clip", "Mul", "Sub") and output == f"{name}_Output" and any(r in name for r in ROLES)
    )
