"""Names: those of a model make way for the documented ones of what is written.

A tensor t gets nodes `t_QuantizeLinear` and `t_DequantizeLinear`, whose outputs end with `_Output`, and constants
`t_scale`, `t_zero_point` and `t_quantized`. Tools match on them, so a model's own `image_scale` beside `image` yields.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx_ops.graph_writer import fixed_shape, free_name

_NODES = ("_QuantizeLinear", "_DequantizeLinear")
VALUES = ("_scale", "_zero_point", "_quantized", "_QuantizeLinear_Input", *(f"{name}_Output" for name in _NODES))


def free_reserved_names(graph: ir.Graph) -> None:
    """Rename inner tensors and nodes whose names will be written; inputs and outputs keep theirs."""
    made = [value for node in graph for value in node.outputs]
    values = [*graph.inputs, *graph.initializers.values(), *made]
    names = {value.name for value in values if value.name}
    for value in values:
        if not (value.is_graph_input() or value.is_graph_output()) and _is_reserved(value.name, VALUES, names):
            name = free_name(value.name or "", names)
            rename(value, name)
            names.add(name)
    nodes = {node.name for node in graph if node.name}
    for node in graph:
        if _is_reserved(node.name, _NODES, names):
            node.name = free_name(node.name or "", nodes)
            nodes.add(node.name)


def rename(value: ir.Value, name: str) -> None:
    """Rename a tensor; what an initializer holds is the user's, and would be renamed with it."""
    own = value.const_value
    if own is not None:
        value.const_value = ir.LazyTensor(lambda: own, dtype=own.dtype, shape=fixed_shape(own), name=name)
    value.name = name


def _is_reserved(name: str | None, suffixes: tuple[str, ...], tensors: set[str]) -> bool:
    return any(name.endswith(suffix) and name.removesuffix(suffix) in tensors for suffix in suffixes) if name else False
