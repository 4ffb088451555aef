"""Replaces operators that write into their input (`x += y`, ReLU(inplace=True)) by those that return a new tensor.

Every later reader of the input reads the result instead. An input that others see by another name (an argument or
buffer of the model, a view, a tensor with views) stays written in place.
"""

from __future__ import annotations

import torch
from torch import fx

from quark.torch.graph.operators import MOVING_OPERATORS, is_call, target_name


def remove_inplace(model: fx.GraphModule) -> None:
    """Rewrite the graph; the outputs stay the same to the bit."""
    position = {node: i for i, node in enumerate(model.graph.nodes)}
    for node in list(model.graph.nodes):
        target, written = functional(node), node.args[0] if node.args else None
        if target is None or not isinstance(written, fx.Node) or written.op != "call_function":
            continue
        if is_call(written, *MOVING_OPERATORS) or any(is_call(reader, *MOVING_OPERATORS) for reader in written.users):
            continue
        node.target = target
        for reader in list(written.users):
            if position[reader] > position[node]:
                reader.replace_input_with(written, node)


def functional(node: fx.Node) -> torch._ops.OpOverload | None:
    """The operator that returns what an operator like `aten.add_.Tensor` writes; None where the name says otherwise."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    library, name, overload = target_name(node).split(".")
    if library != "aten" or not name.endswith("_") or name.startswith("_"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, overload, None)
