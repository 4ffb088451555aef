"""Rule: what quantizing one op type means."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Rule:
    """How the inputs and outputs of an op are quantized.

    Attributes:
        data: Indices of the inputs that are tensors to quantize; None for all.
        weight: Index of the operand that is a weight where it is constant.
        weight_axis: Axis of the output channels of the weight.
        bias: Index of the bias.
        constants: Whether constants among the inputs are quantized too.
        shares_scale: The output holds values of the input only: both have one scale.
    """

    data: tuple[int, ...] | None = None
    weight: int | None = None
    weight_axis: int = 0
    bias: int | None = None
    shares_scale: bool = False
    constants: bool = True

    def inputs(self, node: ir.Node) -> list[int]:
        """Indices of the inputs of this node that are tensors to quantize."""
        return [i for i in (range(len(node.inputs)) if self.data is None else self.data) if i < len(node.inputs)]

    def channel_axis(self, node: ir.Node) -> int:
        """Axis of the output channels of the weight of this node."""
        if node.op_type == "Gemm":
            transposed = node.attributes.get("transB")
            return 0 if transposed is not None and transposed.as_int() else 1
        return self.weight_axis
