"""Fuses the subgraphs of instance normalization into one InstanceNormalization.

y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * gamma + beta        means over all axes after the channels
"""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.graph.edit import dims, replace
from quark.onnx.graph.model_file import constant
from quark.onnx.graph.pattern import Match, match
from quark.onnx.passes.fuse_layer_norm import NORMALIZED, reduced_axes
from quark.onnx_ops.graph_writer import add_constant


def fuse_instance_norm(model: ir.Model) -> int:
    """Fuse every instance normalization with gamma and beta per channel; return how many there were."""
    count = 0
    for pattern in NORMALIZED[:2]:
        for node in [node for node in model.graph if node.op_type == "Add"]:
            matched = match(pattern, node)
            if matched is not None and _fuse(model.graph, node, matched):
                count += 1
    return count


def _fuse(graph: ir.Graph, node: ir.Node, matched: Match) -> bool:
    axes, shape, epsilon = reduced_axes(matched), dims(matched["x"]), constant(matched["epsilon"])
    if axes is None or shape is None or len(shape) < 3 or axes != tuple(range(2, len(shape))) or epsilon.size != 1:
        return False
    channels, parameters = shape[1], []
    for name in ("gamma", "beta"):
        array = constant(matched[name])
        channel_axis = array.ndim - len(shape) + 1
        if channel_axis not in (0, 1) or array.size != channels or array.shape[channel_axis] != channels:
            return False
        parameters.append(array.reshape(-1))
    gamma, beta = (add_constant(graph, f"{node.name}_{i}", array) for i, array in enumerate(parameters))
    replace(node, "InstanceNormalization", [matched["x"], gamma, beta], {"epsilon": float(epsilon.reshape(-1)[0])})
    return True
