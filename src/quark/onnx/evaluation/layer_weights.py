"""The weights of the layers that two models share: in float, and as the quantized file decodes them.

Of the worst layers, a histogram shows what they hold in float, and its clip lines how far the codes reach:

    smallest, largest value = (qmin - zero_point) * scale, (qmax - zero_point) * scale
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from quark.core.array import NumpyArray
from quark.core.metrics import ChannelFit, Comparison
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.evaluation.compare_models import OUTPUT, RESCALED, ComparedLayer, instrumented, match_layers, source_of
from quark.onnx.evaluation.ort_fusion_nodes import ENCODERS, QuantizedGraph
from quark.onnx.graph.proto_file import read_header
from quark.onnx.graph.sessions import open_session, run_sample
from quark.report.figures import ClippedHistogram

FOLDED = "BatchNormalization"
"""The operator that goes into the weight of the layer before it."""
_TURNS = 4
"""Of fitting factors along two axes: noiseless factors are found to 1e-6 and better."""


class LayerWeights:
    """The weights of matching layers; each pair is read when it is asked for.

    ONNX Runtime decodes: it runs the DequantizeLinear nodes of the file alone.

    Args:
        float_model, quantized: Two files.

    Attributes:
        names: Tensor that a layer gives, as `ComparedLayer.tensor` -> the float weight, and the decoded one.

    Raises:
        FormatError: A file is no ONNX model, or does not load.
    """

    def __init__(self, float_model: Path, quantized: Path) -> None:
        before, after = read_header(float_model), read_header(quantized)
        self._float = QuantizedGraph(before.graph, float_model.parent)
        graph = QuantizedGraph(after.graph, quantized.parent)
        self.names: dict[str, tuple[str, str]] = {}
        decoders: dict[str, onnx.NodeProto] = {}
        for tensor, there, _ in match_layers(before.graph, after.graph):
            written = source_of(there, graph.producers)
            own = self._float.producers.get(written.removesuffix(OUTPUT))
            made = graph.producers.get(written)
            if own is not None and made is not None and own.op_type == FOLDED != made.op_type:
                own = self._float.producers.get(own.input[0])
            if own is None or made is None or own.op_type != made.op_type:
                continue
            for name, read in zip(own.input, made.input, strict=False):
                decoder = graph.decoder(read)
                if decoder is None or decoder.input[0] not in graph.constants or name not in self._float.constants:
                    continue
                if graph.kind(decoder) != onnx.TensorProto.INT32:  # a bias
                    self.names.setdefault(tensor, (name, read))
                    decoders[read] = decoder
        self._session = _decoding(after, quantized.parent, decoders) if decoders else None

    def pair(self, tensor: str) -> tuple[NumpyArray, NumpyArray] | None:
        """The float weight of a layer and the decoded one; None where they have other shapes, or none is quantized."""
        if tensor not in self.names or self._session is None:
            return None
        name, read = self.names[tensor]
        found, decoded = self._float.array(name), run_sample(self._session, [read], {})[0]
        return (found, decoded) if found is not None and found.shape == decoded.shape else None

    def sqnr(self, tensor: str) -> float | None:
        """SQNR in dB of a weight, or None. Up to a factor of each channel where batch normalization, or a rescaling,
        went into the weight: as for outputs, where factors explain three quarters of the difference. Equalization
        rescales what a weight reads and what it gives.
        """
        pair = self.pair(tensor)
        if pair is None:
            return None
        plain = Comparison().update(*pair).sqnr
        axes = range(pair[0].ndim) if pair[0].ndim > 1 else ()
        fitted = max(_fitted_both_ways(*pair), *(ChannelFit(axis).update(*pair).sqnr for axis in axes), plain)
        return fitted if fitted > plain + RESCALED else plain


def _fitted_both_ways(x: NumpyArray, y: NumpyArray) -> float:
    """SQNR in dB where y has a factor along its first axis and one along its second, fitted in turns."""
    if x.ndim < 2:
        return -math.inf
    for axis in (1, 0) * _TURNS:
        shape = [-1 if i == axis else 1 for i in range(x.ndim)]
        fit = ChannelFit(axis).update(x, y)
        if fit.noise_to_signal == math.inf:
            return -math.inf
        y = y * fit.factors.reshape(shape)
    return ChannelFit(0).update(x, y).sqnr


def _decoding(model: onnx.ModelProto, folder: Path, decoders: dict[str, onnx.NodeProto]) -> object:
    """A session without inputs whose outputs are the decoded weights."""
    read = {name for node in decoders.values() for name in node.input}
    constants = [node for node in model.graph.node if node.op_type == "Constant" and read & set(node.output)]
    outputs = [onnx.ValueInfoProto(name=name) for name in decoders]
    stored = [tensor for tensor in model.graph.initializer if tensor.name in read]
    graph = helper.make_graph([*constants, *decoders.values()], "weights", [], outputs, stored)
    alone = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    return open_session(alone, folder)


# How far codes reach --------------------------------------------------------------------------------------------------


BITS: dict[int, int] = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.INT8: 8, TensorProto.UINT8: 8,
                        TensorProto.INT16: 16, TensorProto.UINT16: 16}  # fmt: skip
_SIGNED = frozenset({TensorProto.INT4, TensorProto.INT8, TensorProto.INT16})


def value_ranges(
    float_model: Path,
    quantized: Path,
    layers: Iterable[ComparedLayer],
    feeds: Sequence[Feed],
    weights: LayerWeights,
    most: int = 6,
) -> list[ClippedHistogram]:
    """Histograms of float outputs and weights.

    Args:
        float_model, quantized: Two files.
        layers: Worst first.
        feeds: Samples, of which the values of the chosen tensors are in memory at once.
        weights: Of both.
        most: Histograms of outputs, and of weights.
    """
    before, after = read_header(float_model), QuantizedGraph(read_header(quantized).graph, quantized.parent)
    own = {tensor: there for tensor, there, _ in match_layers(before.graph, read_header(quantized).graph)}
    layers = list(layers)
    ranges = {layer.tensor: _range(source_of(own[layer.tensor], after.producers), after) for layer in layers}
    # One tensor is named several times where its Relu was dropped.
    chosen = [name for name, found in ranges.items() if found is not None][:most]
    session = instrumented(before, float_model.parent, chosen, 1)
    values = [run_sample(session, chosen, feed) for feed in feeds] if chosen else []
    histograms = [
        ClippedHistogram.of(f"{name} (output)", np.concatenate([run[i].ravel() for run in values]), ranges[name])
        for i, name in enumerate(chosen)
    ]
    for name in [layer.tensor for layer in layers if layer.tensor in weights.names][:most]:
        pair = weights.pair(name)
        if pair is not None:
            clip = (float(pair[1].min()), float(pair[1].max()))
            histograms.append(ClippedHistogram.of(f"{weights.names[name][0]} (weight)", pair[0], clip))
    return histograms


def _range(name: str, graph: QuantizedGraph) -> tuple[float, float] | None:
    """Return the range of the codes of a tensor; None where it has no integer codes of one constant scale."""
    encoder = next((node for node in graph.consumers.get(name, []) if node.op_type in ENCODERS), None)
    if encoder is None:
        return None
    kind, scale = graph.kind(encoder), graph.array(encoder.input[1])
    zero = graph.array(encoder.input[2]) if len(encoder.input) > 2 and encoder.input[2] else np.zeros((), np.int64)
    if scale is None or zero is None or scale.size != 1 or kind not in BITS:
        return None
    low = -(1 << BITS[kind] - 1) if kind in _SIGNED else 0
    offset, factor = int(zero.astype(np.int64).item()), float(scale.item())
    return (low - offset) * factor, (low + (1 << BITS[kind]) - 1 - offset) * factor
