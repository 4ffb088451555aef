"""The axes of a node along which channels lie: those of its rule, as its attributes turn them."""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.operators import rule_of


def output_axis(node: ir.Node) -> int:
    """Axis of the weight of a node along which its output channels lie; in a ConvTranspose those of one group."""
    rule = rule_of(node.op_type)
    return rule.input_axis if node.attributes.get_int("transB", 0) else rule.output_axis


def input_axis(node: ir.Node) -> int:
    """Axis of the weight of a node that it sums over; in a Conv it holds the input channels of one group."""
    rule = rule_of(node.op_type)
    return rule.output_axis if node.attributes.get_int("transB", 0) else rule.input_axis


def data_axis(node: ir.Node) -> int | None:
    """Axis of the first input of a node that it sums over; None where there is none."""
    axis = rule_of(node.op_type).data_axis
    if axis is None:
        return None
    return 0 if node.attributes.get_int("transA", 0) else node.attributes.get_int("axis", axis)


def result_axis(node: ir.Node) -> int | None:
    """Axis of the output of a node along which its output channels lie; None where there is none."""
    axis = rule_of(node.op_type).result_axis
    return data_axis(node) if axis is None else axis
