"""What the worst layers hold in float, and how far their codes reach: a histogram with its clip lines for each.

smallest, largest value = (qmin - zero_point) * scale, (qmax - zero_point) * scale
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from onnx import TensorProto

from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.evaluation.compare_models import ComparedLayer, instrumented, match_layers, source_of
from quark.onnx.evaluation.layer_weights import LayerWeights
from quark.onnx.evaluation.ort_fusion_nodes import ENCODERS, QuantizedGraph
from quark.onnx.graph.proto_file import read_header
from quark.onnx.graph.sessions import run_sample
from quark.report.figures import ClippedHistogram

BITS: dict[int, int] = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.INT8: 8, TensorProto.UINT8: 8,
                        TensorProto.INT16: 16, TensorProto.UINT16: 16}  # fmt: skip
SIGNED = frozenset({TensorProto.INT4, TensorProto.INT8, TensorProto.INT16})


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
    """What the codes of a tensor reach; None where it has no integer codes of one constant scale."""
    encoder = next((node for node in graph.consumers.get(name, []) if node.op_type in ENCODERS), None)
    if encoder is None:
        return None
    kind, scale = graph.kind(encoder), graph.array(encoder.input[1])
    zero = graph.array(encoder.input[2]) if len(encoder.input) > 2 and encoder.input[2] else np.zeros((), np.int64)
    if scale is None or zero is None or scale.size != 1 or kind not in BITS:
        return None
    low = -(1 << BITS[kind] - 1) if kind in SIGNED else 0
    offset, factor = int(zero.astype(np.int64).item()), float(scale.item())
    return (low - offset) * factor, (low + (1 << BITS[kind]) - 1 - offset) * factor
