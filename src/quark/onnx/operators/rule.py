"""Rule: what quantizing one op type means, and along which axes the channels of a layer lie."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Rule:
    """How the inputs and outputs of an op are quantized.

    The axes are those without transA and transB. In a convolution with groups, one of the two axes of the weight holds
    the channels of one group only: the input axis of a Conv, the output axis of a ConvTranspose.

    Attributes:
        data: Indices of the inputs that are tensors to quantize; None for all.
        weight: Index of the operand that is a weight where it is constant.
        output_axis: Axis of the weight along which the output channels lie.
        input_axis: Axis of the weight along which the input channels lie, which the op multiplies and sums over.
        data_axis: Axis of the first input along which these lie; None for an op that sums over none. An attribute
            `axis` of a node says another.
        result_axis: Axis of the output along which the output channels lie; None where it is the data axis.
        bias: Index of the bias.
        constants: Whether constants among the inputs are quantized too.
        stored: Indices of constants that are kept as codes where activations stay in float or are quantized as they
            come: the matrices of a recurrent layer, a table whose rows are picked.
        window: Each output is of several positions of the input, which lie along the axes after that of the channels.
        shares_scale: The output holds values of the input only: both have one scale; see `moves`.
        homogeneous: A positive factor of a channel of the input is one of the output.
    """

    data: tuple[int, ...] | None = None
    weight: int | None = None
    output_axis: int = 0
    input_axis: int = 1
    data_axis: int | None = None
    result_axis: int | None = None
    bias: int | None = None
    window: bool = False
    shares_scale: bool = False
    homogeneous: bool = False
    constants: bool = True
    stored: tuple[int, ...] = ()

    def inputs(self, node: ir.Node) -> list[int]:
        """Indices of the inputs of this node that are tensors to quantize."""
        return [i for i in (range(len(node.inputs)) if self.data is None else self.data) if i < len(node.inputs)]

    def moves(self, node: ir.Node) -> bool:
        """Return True where the output of this node has values of its input only, or zeros: both have one scale."""
        # Beyond its input a Resize may put a value of its own, which may lie anywhere.
        mode = node.attributes.get_string("coordinate_transformation_mode", "")
        outside = mode == "tf_crop_and_resize" and node.attributes.get_float("extrapolation_value", 0.0) != 0.0
        return self.shares_scale and not outside
