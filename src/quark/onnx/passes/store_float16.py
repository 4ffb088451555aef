"""Stores float32 constants as float16 after a Cast: half the size, and ONNX Runtime casts them once, at load.

w' = float32(float16(w))          |w' - w| <= 2^-11 |w| for normal values: about 73 dB
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.onnx.graph.model_file import is_quantized
from quark.onnx_ops.graph_writer import GraphWriter, free_name

LEAST_SIZE = 1024
"""Values: a smaller constant saves less than its Cast takes."""
_LEAST_SQNR = 60.0
"""dB of a constant: values below float16's normal range lose more."""


def store_float16(model: ir.Model) -> int:
    """Store the large float32 constants of a graph as float16; return how many.

    Constants that overflow float16, or lose digits because they are too small for it, stay as they are.
    """
    graph = model.graph
    writer, count = GraphWriter(model), 0
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.dtype != ir.DataType.FLOAT or tensor.size < LEAST_SIZE or value.is_graph_output():
            continue
        if any(is_quantized(use.node) for use in value.uses()):  # a scale
            continue
        array = tensor.numpy()
        half = as_float16(array)
        if half is None:
            continue
        stored = writer.shared(free_name(f"{name}_float16", graph.initializers), half)
        decoded = writer.node("Cast", [stored], f"{name}_Cast", {"to": int(ir.DataType.FLOAT)})
        writer.insert_after(None)
        decoded.type, decoded.shape = ir.TensorType(ir.DataType.FLOAT), value.shape
        value.replace_all_uses_with(decoded)
        del graph.initializers[name]
        count += 1
    return count


def as_float16(array: NumpyArray) -> NumpyArray | None:
    """The array as float16; None where that loses more than its last digits."""
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    error = half.astype(np.float64) - array
    noise, signal = float(np.vdot(error, error)), float(np.vdot(array.astype(np.float64), array))
    fine = np.isfinite(half).all() and noise <= signal * 10 ** (-_LEAST_SQNR / 10)
    return half if fine else None
