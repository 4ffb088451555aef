"""Takes initializers out of the graph's inputs, where models before IR version 4 list them: they are then constants."""

from __future__ import annotations

import onnx_ir as ir

_FIRST_IR_VERSION = 4


def remove_input_init(model: ir.Model) -> int:
    """Remove every initializer from the inputs; return how many there were."""
    inputs = model.graph.inputs
    real = [value for value in inputs if not value.is_initializer()]
    count = len(inputs) - len(real)
    if count:
        inputs.clear()
        inputs.extend(real)
        model.ir_version = max(model.ir_version, _FIRST_IR_VERSION)
    return count
