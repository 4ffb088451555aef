"""Makes the columns of stacked matrices equal in range, where the integer kernel has one scale for all of them.

    x @ W = (x @ (W 2^k)) 2^-k        W (..., K, N), k (..., 1, N): as many doublings as each column bears

MatMul in integers takes scales of columns for one matrix only. Powers of two change no digit.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.channels import unshared
from quark.onnx.graph.edit import STANDS_FOR, is_op, set_initializer
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx_ops.graph_writer import GraphWriter

WIDEST = 4.0
"""Largest over smallest magnitude of columns that share a scale: the smallest keep 6 of 8 bits."""
_MOST_DOUBLINGS = 24


def balance_columns(model: ir.Model, excluded: Container[str] = ()) -> int:
    """Balance the stacked constant weights of MatMul nodes, but for those of these names; return how many."""
    count, writer = 0, None
    for node in [node for node in model.graph if is_op(node, "MatMul") and node.name not in excluded]:
        weight = node.inputs[1]
        if not is_constant(weight) or is_constant(node.inputs[0]):
            continue
        array = constant(weight)
        if array.ndim < 3 or array.dtype != np.float32 or not array.size or not np.isfinite(array).all():
            continue
        largest = np.abs(array).max(-2, keepdims=True)
        most, nonzero = largest.max(), largest > 0
        if not nonzero.any() or most <= WIDEST * largest[nonzero].min():
            continue
        doublings = np.zeros(largest.shape)
        doublings[nonzero] = np.minimum(np.floor(np.log2(most / largest[nonzero])), _MOST_DOUBLINGS)
        set_initializer(unshared(node, 1), (array * np.exp2(doublings)).astype(np.float32))
        writer = writer or GraphWriter(model)
        factor = writer.constant(f"{node.name}_columns", np.exp2(-doublings).astype(np.float32))
        writer.multiply(node, factor, "_balanced").meta[STANDS_FOR] = node.meta.get(STANDS_FOR, node.name)
        count += 1
    return count
