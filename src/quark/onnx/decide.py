"""From a float model to a quantized one, in two steps: every number is decided, then everything is written.

Between the two nothing of the graph has changed, so what was decided can be looked at, or decided once more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from quark.core.scales import QParams
from quark.onnx.calibration.calibrate import activation_params
from quark.onnx.calibration.overrides import override_params, override_specs
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.calibration.qparams import ModelQParams, fit_int32_biases, weight_params, widen_softmax
from quark.onnx.config.settings import Settings
from quark.onnx.graph.reserved_names import free_reserved_names
from quark.onnx.npu.rules import adjust
from quark.onnx.operators.targets import TARGETS
from quark.onnx.placement.channel_scales import refine_scales
from quark.onnx.placement.place import place
from quark.onnx.placement.placement import Placement
from quark.onnx.qdq.write_qdq import write_qdq


@dataclass
class Decision:
    """The placement of a model and its scales and zero points.

    Attributes:
        model: The float model; after `write`, the quantized one.
        settings: What was asked for.
        placement: Which tensors, with which spec.
        qparams: Their scales and zero points.
    """

    model: ir.Model
    settings: Settings
    placement: Placement
    qparams: ModelQParams


def decide(prepared: Prepared, settings: Settings, fold: bool = True) -> Decision:
    """Placement and qparams of a float model, which is not changed but for Relus that the range makes needless.

    Args:
        prepared: The float model, simulation done; its data may be None where nothing needs any.
        settings: Layers and specs.
        fold: Drop needless Relus; without it the model still computes in float what it did.
    """
    model, statistics = prepared.model, prepared.own_statistics
    placement = place(model, settings)
    override_specs(placement, settings)
    activations = activation_params(prepared, placement, settings)
    widen_softmax(placement, activations)
    qparams = ModelQParams(activations, weight_params(placement, settings, statistics))
    if settings.specs.weights_apart and settings.specs.refine_weight_scales:
        finer = refine_scales(placement, settings, qparams.weights)
        placement.weights |= finer
        qparams.weights |= weight_params(replace(placement, weights=finer), settings, statistics)
    override_params(placement, qparams, settings)
    if fold and (settings.qdq.fold_relu or TARGETS[settings.qdq.target].folds_relu):
        fold_relu(model, placement, qparams.activations)
    qparams = adjust(placement, qparams, settings)
    if settings.qdq.fit_int32_bias and not settings.qdq.int16_bias:
        fit_int32_biases(placement, qparams)
    return Decision(model, settings, placement, qparams)


def write(decision: Decision) -> dict[ir.Node, ir.Node]:
    """Put integers and Q/DQ into the model.

    Codes are computed from the float values of weights and biases when they are read: one that changes after this
    has other codes under the same scale.

    Returns:
        Each node that another stands for now -> that one.
    """
    free_reserved_names(decision.model.graph)
    return write_qdq(decision.model, decision.settings, decision.placement, decision.qparams)


def fold_relu(model: ir.Model, placement: Placement, params: dict[ir.Value, QParams]) -> int:
    """Drop every Relu whose output's zero point is the smallest code: quantizing clips at zero by itself."""
    count = 0
    for node in [n for n in placement.nodes if n.op_type == "Relu"]:
        source, output = node.inputs[0], node.outputs[0]
        if source is None or source in placement.activations or not _is_clipped(node, placement, params):
            continue
        if len(list(source.uses())) != 1 or source.producer() is None:
            continue
        output.replace_all_uses_with(source)
        root = placement.root(output)
        placement.activations[source] = placement.activations.pop(output)
        if root is output:
            params[source] = params[output]
            placement.shared.update({member: source for member, to in placement.shared.items() if to is output})
        else:
            placement.shared[source] = root
        placement.nodes.remove(node)
        model.graph.remove(node, safe=True)
        count += 1
    return count


def _is_clipped(relu: ir.Node, placement: Placement, params: dict[ir.Value, QParams]) -> bool:
    """True where the codes of the output of a Relu end at zero, and all readers of it read codes."""
    output = relu.outputs[0]
    spec = placement.activations.get(output)
    zero = params[placement.root(output)].zero_point if spec is not None and spec.has_zero_point else None
    if spec is None or zero is None or output.is_graph_output():
        return False
    if any(use.node.graph is not relu.graph for use in output.uses()):
        return False  # a body reads what is not quantized, so that nothing would clip it
    return float(zero) == spec.dtype.min
