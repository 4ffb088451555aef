"""Bias correction of an ONNX model, layer after layer, each with those before it corrected already.

Both models run once over the data, the float one for its means alone. The quantized one is cut at what each layer
reads: the means of what it gives follow from that (`linear_means.py`), its bias moves, and the next slice begins with
it. Slices compute in the integer kernels of the runtime where these are exact. Layers with a bias of their own, or of
an Add after a MatMul; one without gets zeros first. The formula is in `core/solvers/bias_correction.py`.

The named configurations with one scale a weight correct biases by themselves. Small channels have few codes, and their
errors a mean, which adds up from layer to layer where noise cancels; a scale that is a power of two clips the largest
values of most tensors, an error of one sign too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from quark.base.progress import progress
from quark.core.array import NumpyArray
from quark.core.solvers.bias_correction import LEAST, LEAST_OF_WEIGHTS, certain_mean, require_examples
from quark.core.spec import ScaleType
from quark.errors import CalibrationError
from quark.onnx.algorithms.layer_sweep import RealRows
from quark.onnx.algorithms.quantized_layers import QuantizedLayer, QuantizedLayers, bias_of, decoded
from quark.onnx.algorithms.rescaling.linear_means import LinearMeans, is_plain_decoder
from quark.onnx.algorithms.sliced_run import SlicedRun, has_plain_codes, holds_codes
from quark.onnx.calibration.byproducts import SampleRows, position_means
from quark.onnx.calibration.data.padding import Padding
from quark.onnx.calibration.data.samples import Samples, Store, required
from quark.onnx.calibration.sliced_session import SlicedSession
from quark.onnx.config.algo_configs import AdaQuantConfig, AdaRoundConfig, BiasCorrectionConfig
from quark.onnx.config.settings import Settings
from quark.onnx.graph.channels import matmul_bias, output_channels
from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.graph.sessions import open_session
from quark.onnx.operators import BIASED, PRODUCTS, result_axis
from quark.onnx.placement.select_nodes import select_nodes
from quark.onnx_ops.graph_writer import add_constant


def check_examples(model: ir.Model, config: BiasCorrectionConfig, settings: Settings, data: Samples) -> None:
    """Raise CalibrationError where no layer sees examples enough, before anything is calibrated."""
    layers = [node for node in select_nodes(model, settings) if is_op(node, *BIASED)]
    required(data, config)
    known = [count for node in layers if (count := _examples(node, data)) is not None]
    least = _least(settings)
    require_examples(max(known, default=least), least)


def add_biases(model: ir.Model, config: BiasCorrectionConfig, settings: Settings, data: Samples | None) -> int:
    """Give layers without a bias one of zeros, where it is not quantized on a grid of its own, which has zeros only."""
    count = 0
    for node, layer in select_nodes(model, settings).items():
        without = is_op(node, *BIASED) and (len(node.inputs) < 3 or node.inputs[2] is None)
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
    return _correct(quantized, required(quantized.data, config))


def correct_where_certain(quantized: QuantizedLayers) -> int:
    """Correct the biases of the layers that see examples enough; return how many there are: none without data."""
    algorithms = quantized.decision.settings.algorithms
    data = quantized.data
    if (
        data is None
        or any(isinstance(one, BiasCorrectionConfig) for one in algorithms)
        or _count_examples(data) < LEAST
    ):
        return 0
    return _correct(quantized, data, skips=True)


def learning_starts_corrected(settings: Settings) -> bool:
    """Return True where biases are corrected unasked before weights are learned, not after.

    What is learned makes up for a mean error in its own way, and a correction on top of it fits the samples: on OCR
    direction, two held-out sets, A8W8 with AdaRound had 10.5 and 17.2 dB by one after it, 12.5 and 26.8 by one before.
    Scales that are powers of two clip, and what they clip changes with the weights: 11.2 and 21.3 dB by one after it,
    7.1 and 18.6 by one before.
    """
    learns = any(isinstance(one, (AdaRoundConfig, AdaQuantConfig)) for one in settings.algorithms)
    activation = settings.specs.layer.input
    return learns and activation is not None and activation.scale_type is not ScaleType.pof2


def wanted_means(model: ir.Model, settings: Settings) -> list[ir.Node]:
    """The layers of a float model whose means a correction asks for: of those with a bias that may move.

    None where Q/DQ of the model compute. What is quantized later has fewer such layers, not more.
    """
    asked = settings.correct_biases or any(isinstance(one, BiasCorrectionConfig) for one in settings.algorithms)
    if not asked or any(node.op_type == "QuantizeLinear" for node in model.graph):
        return []
    layers = (node for node in select_nodes(model, settings) if is_op(node, *BIASED) or matmul_bias(node))
    return [node for node in layers if (bias := bias_of(node)) is not None and len(bias.uses()) == 1]


def _least(settings: Settings) -> int:
    """How many examples a correction takes."""
    return LEAST_OF_WEIGHTS if settings.specs.weights_only else LEAST


def _examples(node: ir.Node, data: Samples) -> int | None:
    """How many examples a layer sees, by the first axis of what it reads; None where that follows from values."""
    source = node.inputs[0]
    turned: int = node.attributes.get_int("transA", 0)
    if source is None or source.shape is None or len(source.shape) < 2 or turned:
        return None
    first = source.shape[0]
    if isinstance(first, int):
        return len(data) * first
    inputs = source.graph.inputs if source.is_graph_input() and source.graph is not None else ()
    return _count_examples(data) if source in inputs else None


def _count_examples(data: Samples) -> int:
    """How many examples the samples hold, as far as the first axis of an input counts them."""
    return sum(max((len(array) for array in feed.values() if array.ndim), default=1) for feed in data)


def _correct(quantized: QuantizedLayers, data: Samples, skips: bool = False) -> int:
    """Correct every bias; layers with too few examples keep theirs where they may be skipped."""
    least = _least(quantized.decision.settings)
    own = [layer for layer in quantized.layers if not layer.shared and layer.factor != 0]
    layers = [x for x in own if x.offset is not None and x.offset.shape == (output_channels(x.counterpart),)]
    count = 0
    means = _Means(quantized, data)
    goals = means.of_float(layers)
    model = quantized.decision.model
    reads = {layer: _Read.of(quantized.input_of(layer)) for layer in layers}
    in_codes = has_plain_codes(model)
    left = [read.value for read in reads.values()]
    run = SlicedRun(model, data, len(data), Store(), left, in_codes=in_codes)
    for layer in progress(layers, "layers", len(layers), name=lambda layer: layer.name):
        data.check_time()
        value = reads[layer].value
        run.reach(value)
        found = means.of_quantized(layer, reads[layer], run)
        if not skips or len(found) >= least:
            _move_bias(quantized, layer, goals.pop(layer) - found, least)
            count += 1
        left.remove(value)
        if value not in left:
            run.release(value)
    return count


@dataclass(frozen=True)
class _Read:
    """The tensor that a layer reads in the quantized model: codes of one scale, and what decodes them; or floats.

    Attributes:
        value: The tensor that waits.
        decoder: The DequantizeLinear after codes; None after floats.
    """

    value: ir.Value
    decoder: ir.Node | None

    @classmethod
    def of(cls, value: ir.Value) -> _Read:
        """By what is read."""
        source = value.producer()
        if source is None or not is_plain_decoder(source) or constant(source.inputs[1]).ndim:
            return cls(value, None)
        codes = source.inputs[0]
        return cls(codes, source) if codes is not None and holds_codes(codes) else cls(value, None)


def _move_bias(quantized: QuantizedLayers, layer: QuantizedLayer, differences: NumpyArray, least: int) -> None:
    """Correct the bias of a layer.

    Args:
        quantized: The models.
        layer: The layer.
        differences: Of each example the mean over positions, float output less quantized one, (examples, channels).
        least: How many examples it takes.
    """
    offset, decision = layer.offset, quantized.decision
    assert offset is not None
    spec = decision.placement.weights.get((layer.node, 2))
    before = offset if spec is None else decoded(offset, decision.qparams.weights[layer.node, 2], spec)
    # What rounding the bias itself adds to the output is no error that another bias could make up for.
    rounding = layer.factor * (before - offset)
    try:
        change = certain_mean(differences + rounding, least) / layer.factor
    except CalibrationError as error:
        raise CalibrationError(f"{layer.name}: {error}") from None
    layer.offset = offset + change.astype(np.float32)


def _axis(layer: QuantizedLayer) -> int:
    """Axis of the output along which the channels lie."""
    axis = result_axis(layer.node)
    assert axis is not None
    return axis


class _Means:
    """Means over the positions of an output, apart for each example of a sample, shape (examples, channels).

    Args:
        quantized: The models.
        data: The samples.
    """

    def __init__(self, quantized: QuantizedLayers, data: Samples) -> None:
        self._quantized, self._data, self._known = quantized, data, quantized.byproducts.means
        self._real = RealRows(Padding.of(quantized.reference), data)

    def of_quantized(self, layer: QuantizedLayer, read: _Read, run: SlicedRun) -> NumpyArray:
        """Those of all samples in the quantized model, as it is now.

        Args:
            layer: The layer.
            read: What it reads.
            run: Where that waits.
        """
        output = self._quantized.output_of(layer)
        linear = None if (node := output.producer()) is None else LinearMeans.of(node, run.constant)
        if linear is None:
            outputs = run.peek(output)
            return np.concatenate(
                [self._real_values(layer, sample, x, _axis(layer)) for sample, x in enumerate(outputs)]
            )
        found, product = [], layer.counterpart.op_type in PRODUCTS
        for sample in range(len(self._data)):
            x = run.value(sample, read.value)
            x = x if read.decoder is None else x.astype(np.float32)
            inputs = self._real_values(layer, sample, x, -1) if product else linear.inputs(x)
            found.append(inputs if read.decoder is None else linear.of_codes(inputs, x.shape[2:], read.decoder))
        return linear(np.concatenate(found))

    def _real_values(self, layer: QuantizedLayer, sample: int, array: NumpyArray, axis: int) -> NumpyArray:
        """Those of what a layer gives for a sample, or of the rows that it reads."""
        # The positions of a convolution are not apart.
        apart = layer.counterpart.op_type in PRODUCTS
        examples = self._real.examples(sample, self._real(sample, array)) if apart else [array]
        return np.concatenate([position_means(each, axis) for each in examples])

    def of_float(self, layers: Sequence[QuantizedLayer]) -> dict[QuantizedLayer, NumpyArray]:
        """Those of all samples in the float model: of calibration, or of a run in parts that hold no more outputs."""
        named = {layer.counterpart.outputs[0].name or "": layer for layer in layers}
        known = self._known
        if all(name in known and known[name].samples == len(self._data) for name in named):
            return {layer: known[name].array for name, layer in named.items()}
        found = {layer: SampleRows() for layer in layers}
        run: SlicedSession | None = None
        for sample, feed in enumerate(self._data):
            run = run or SlicedSession(self._quantized.reference, list(named), feed, _open)
            for outputs in run.run(feed):
                for name, output in outputs.items():
                    found[named[name]].add(self._real_values(named[name], sample, output, _axis(named[name])))
        known |= {layer.counterpart.outputs[0].name or "": rows for layer, rows in found.items()}
        return {layer: rows.array for layer, rows in found.items()}


def _open(proto: onnx.ModelProto, weights: Mapping[str, Any], arena: bool) -> onnxruntime.InferenceSession:
    return open_session(proto, threads=os.cpu_count() or 1, in_float=True, weights=weights, arena=arena)
