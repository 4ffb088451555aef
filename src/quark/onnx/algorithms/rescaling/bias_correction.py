"""Bias correction of an ONNX model, layer after layer, each with those before it corrected already.

Both models run once over the data. Layers with a bias of their own, or of an Add behind a MatMul; one without gets
zeros first. The formula is in `core/solvers/bias_correction.py`.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.core.solvers.bias_correction import certain_mean
from quark.errors import CalibrationError
from quark.onnx.algorithms.layer_sweep import Visit, sweep
from quark.onnx.algorithms.quantized_layers import QuantizedLayer, QuantizedLayers, decoded
from quark.onnx.calibration.data.samples import Samples, required
from quark.onnx.config.algo_configs import BiasCorrectionConfig
from quark.onnx.config.settings import Settings
from quark.onnx.graph.channels import output_channels
from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.operators.axes import result_axis
from quark.onnx.placement.select_nodes import select_nodes
from quark.onnx_ops.graph_writer import add_constant

WITH_BIAS = ("Conv", "ConvTranspose", "Gemm")


def add_biases(model: ir.Model, config: BiasCorrectionConfig, settings: Settings, data: Samples | None) -> int:
    """Give layers without a bias one of zeros, where it is not quantized on a grid of its own, which has zeros only."""
    count = 0
    for node, layer in select_nodes(model, settings).items():
        without = is_op(node, *WITH_BIAS) and (len(node.inputs) < 3 or node.inputs[2] is None)
        own_grid = layer.bias is not None and (layer.bias.has_zero_point or not settings.specs.int32_bias)
        if without and is_constant(node.inputs[1]) and not own_grid:
            weight = constant(node.inputs[1])
            node.resize_inputs(3)
            zeros = np.zeros(output_channels(node), weight.dtype)
            assert node.graph is not None
            node.replace_input_with(2, add_constant(node.graph, f"{node.name}_bias", zeros))
            count += 1
    return count


def correct_biases(quantized: QuantizedLayers, config: BiasCorrectionConfig) -> int:
    """Correct every bias; return how many there are.

    Raises:
        CalibrationError: No data, or too few.
    """
    data = required(quantized.data, config)
    layers = [layer for layer in quantized.layers if _qualifies(layer)]
    for visit in sweep(quantized, layers, data):
        layer, offset = visit.layer, visit.layer.offset
        assert offset is not None
        try:
            change = certain_mean(_differences(visit) + _rounding(quantized, layer)) / layer.factor
        except CalibrationError as error:
            raise CalibrationError(f"{layer.name}: {error}") from None
        layer.offset = offset + change.astype(np.float32)
    return len(layers)


def _qualifies(layer: QuantizedLayer) -> bool:
    own = layer.offset is not None and layer.offset.shape == (output_channels(layer.twin),)
    return own and not layer.shared and layer.factor != 0


def _differences(visit: Visit) -> NumpyArray:
    """Of each example the mean over positions, float output less quantized one, shape (examples, channels)."""
    axis = result_axis(visit.layer.node)
    assert axis is not None
    means = []
    for index, output in enumerate(visit.quantized_outputs()):
        difference = np.atleast_2d(np.subtract(visit.outputs[index], output, dtype=np.float32))
        error = np.moveaxis(difference, axis, -1)
        means.append(error.mean(tuple(range(1, error.ndim - 1)), dtype=np.float64))
    return np.concatenate(means)


def _rounding(quantized: QuantizedLayers, layer: QuantizedLayer) -> NumpyArray | float:
    """What rounding the bias itself adds to the output: no error that another bias could make up for."""
    spec, offset = quantized.decision.placement.weights.get((layer.node, 2)), layer.offset
    if spec is None or offset is None:
        return 0.0
    return layer.factor * (decoded(offset, quantized.decision.qparams.weights[layer.node, 2], spec) - offset)
