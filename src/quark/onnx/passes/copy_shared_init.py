"""Gives each node an initializer of its own where several share one, so that each can be quantized in its own way."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from quark.onnx.graph.edit import is_op
from quark.onnx.operators import BIASED
from quark.onnx_ops.graph_writer import add_constant


def copy_shared_init(model: ir.Model, op_types: Sequence[str] = ()) -> int:
    """Copy what nodes of these op types (empty: all) share with others; return how many copies were made."""
    return _copy(model, op_types, None)


def copy_bias_init(model: ir.Model, op_types: Sequence[str] = BIASED) -> int:
    """Copy the biases that nodes of these op types share with others; return how many copies were made."""
    return _copy(model, op_types or BIASED, 2)


def _copy(model: ir.Model, op_types: Sequence[str], index: int | None) -> int:
    """The first reader keeps the original; copies share its memory until one is changed."""
    count = 0
    for name, value in list(model.graph.initializers.items()):
        for use in list(value.uses())[1:]:
            chosen = is_op(use.node, *op_types) if op_types else True
            if not chosen or index not in (None, use.idx) or use.node.graph is not model.graph:
                continue
            assert value.const_value is not None
            copy = add_constant(model.graph, f"{name}_{use.node.name}", value.const_value)
            use.node.replace_input_with(use.idx, copy)
            count += 1
    return count
