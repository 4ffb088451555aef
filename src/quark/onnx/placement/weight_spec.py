"""Along which axis a weight has its scales: that of its output channels, or of the sum over a group."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from quark.core.granularity import PerChannel, PerGroup, PerTensor
from quark.core.spec import TensorSpec
from quark.errors import NotSupportedError
from quark.onnx.config.settings import Settings
from quark.onnx.graph.model_file import constant
from quark.onnx.operators import output_axis, rule_of


def weight_spec(node: ir.Node, spec: TensorSpec, settings: Settings) -> TensorSpec:
    """The spec of the weight of a node, its granularity along the axis that the op has.

    Args:
        node: With a constant weight.
        spec: Of the layer; the axis of its channels or groups is that of a Linear.
        settings: `channel_axes` is checked; `weights_only` allows scales of stacked matrices.

    Raises:
        NotSupportedError: Channels along another axis than that of the outputs are asked for.
    """
    granularity = spec.granularity
    if spec.is_block or not isinstance(granularity, (PerChannel, PerGroup)):
        return spec
    shape = constant(node.inputs[rule_of(node.op_type).weight or 0]).shape
    axis = output_axis(node) % max(1, len(shape))
    _check_axis(node, axis, shape, settings)
    if isinstance(granularity, PerGroup) and len(shape) == 2:
        return replace(spec, granularity=PerGroup(1 - axis, granularity.size, pad=True))
    # The integer kernel of MatMul takes one scale for a stack of matrices.
    stacked = node.op_type == "MatMul" and len(shape) > 2 and not settings.specs.weights_only
    return replace(spec, granularity=PerTensor() if stacked or len(shape) < 2 else PerChannel(axis))


def _check_axis(node: ir.Node, axis: int, shape: tuple[int, ...], settings: Settings) -> None:
    """Raise NotSupportedError where the settings name another axis for the channels of this op type."""
    requested = dict(settings.specs.channel_axes).get(node.op_type, axis)
    if requested not in (axis, axis - len(shape)):
        raise NotSupportedError(
            f"QDQOpTypePerChannelSupportToAxis: axis {requested} of the weight {list(shape)} of {node.name}: runtimes "
            f"have integer kernels for scales of output channels only. Possible: {axis}, or leave the op type out."
        )
