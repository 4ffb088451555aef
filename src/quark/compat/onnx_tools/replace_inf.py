"""Replaces infinite weights by a finite value of the same sign."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.onnx.graph.edit import set_initializer


def replace_inf_weights(model: ir.Model, replace_inf_value: float) -> int:
    """Replace infinity by a value and -infinity by its negative; return how many initializers had some."""
    count = 0
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point():
            continue
        array = tensor.numpy()
        infinite = np.isinf(array)
        if infinite.any():
            set_initializer(value, np.where(infinite, np.sign(array) * replace_inf_value, array).astype(array.dtype))
            count += 1
    return count
