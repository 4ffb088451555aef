"""A node of an extended operator in a graph, and its function in the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quark.onnx_ops.operators import DOMAIN, MINIMUM_IR, VERSION, Operator, function

if TYPE_CHECKING:
    import onnx_ir as ir


def add_function_node(model: ir.Model, operator: Operator, inputs: Sequence[ir.Value], name: str) -> ir.Node:
    """A node of an extended operator; the model gets its function, the import and the IR version that these need."""
    # onnx_ir takes half a second to import: when a graph is really written.
    import onnx_ir as ir

    key = (DOMAIN, operator.name, operator.overload)
    if key not in model.functions:
        model.functions[key] = ir.serde.deserialize_function(function(operator, int(model.opset_imports.get("", 0))))
        model.opset_imports[DOMAIN] = VERSION
        model.ir_version = max(model.ir_version, MINIMUM_IR)
    attributes = dict(operator.attributes)
    node = ir.node(operator.name, inputs, attributes, domain=DOMAIN, overload=operator.overload, name=name)
    node.outputs[0].name = f"{name}_Output"
    return node
