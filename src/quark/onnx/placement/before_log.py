"""Products that a logarithm takes, as in log-mel features: int8 activations lose them, int8 weights do not.

    y = W q s + e,  |e| ~ s    ->    log(y + e) = log y + log(1 + e / y)

One step `s` for a whole spectrum is a 255th of its loudest value, while the logarithm is of values a millionth of it:
those become 0, or noise. A rounded weight is off by a share of itself, which the logarithm turns into a small constant.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.operators import RULES
from quark.onnx.placement.kernels import DYNAMIC_KERNELS

KEEPS_ORDERS = {"Abs", "Add", "Cast", "Div", "Max", "Min", "Mul", "Neg", "Pow", "ReduceL2", "ReduceMean", "ReduceSum",
                "ReduceSumSquare", "Sqrt", "Sub", "Where"}  # fmt: skip
"""Op types whose output spans as many orders of magnitude as their input; a saturation, as a Softmax, limits both."""
LEAST_ORDERS = 256.0
"""Upper over lower bound of a Clip from which on its output spans orders: one scale of 8 bits serves less."""
KEEPS_ORDERS |= {name for name, rule in RULES.items() if rule.shares_scale} | set(DYNAMIC_KERNELS)


def nodes_before_log(graph: ir.Graph) -> set[ir.Node]:
    """The layers of a graph whose products reach a Log through sums, powers and other layers."""
    reached: set[ir.Node] = set()
    waiting = [node.inputs[0] for node in graph if is_op(node, "Log")]
    while waiting:
        value = waiting.pop()
        node = None if value is None else value.producer()
        if node is not None and node not in reached and _keeps_orders(node):
            reached.add(node)
            waiting.extend(node.inputs)
    return {node for node in reached if node.op_type in DYNAMIC_KERNELS}


def _keeps_orders(node: ir.Node) -> bool:
    """Whether the output of a node spans what its input spans; a Clip does unless its bounds are near each other."""
    if is_op(node, "Clip"):
        low, high = _bound(node, 1, "min"), _bound(node, 2, "max")
        return low is None or high is None or low <= 0 or high > LEAST_ORDERS * low
    return node.domain in ("", "ai.onnx") and node.op_type in KEEPS_ORDERS


def _bound(node: ir.Node, index: int, name: str) -> float | None:
    """A bound of a Clip, an input or an attribute; None where there is none, or it is computed."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is not None:
        return float(constant(value).reshape(-1)[0]) if is_constant(value) and constant(value).size else None
    return node.attributes.get_float(name) if name in node.attributes else None
