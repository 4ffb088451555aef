"""Another algorithm on the layers whose output is worst, where there is no time for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quark.core.metrics import Comparison
from quark.onnx.algorithms.layer_sweep import sweep
from quark.onnx.algorithms.quantized_layers import QuantizedLayer, QuantizedLayers
from quark.onnx.calibration.data.readers import TimeUpError
from quark.onnx.calibration.data.samples import required
from quark.onnx.graph.model_file import constant


@dataclass(frozen=True)
class WorstLayers:
    """An algorithm for the worst layers, as recovery asks for it.

    Attributes:
        algorithm: The config of an algorithm of AFTER.
        run: The algorithm.
        share: Of the layers, rounded down.
    """

    algorithm: Any
    run: Callable[[QuantizedLayers, Any], int]
    share: float


def improve_worst(quantized: QuantizedLayers, config: WorstLayers) -> int:
    """Run the algorithm on a share of the layers, from their float weights; return what it does.

    Raises:
        TimeUpError: There is no time for one layer.
    """
    count = int(config.share * len(quantized.layers))
    if not count:
        raise TimeUpError
    worst = sorted(damages(quantized).items(), key=lambda entry: entry[1])[:count]
    chosen = {layer for layer, _ in worst}
    for layer in chosen:
        # What an earlier algorithm rounded has nothing left to learn from.
        layer.weight = constant(layer.counterpart.inputs[layer.index])
    return config.run(
        replace(quantized, layers=[layer for layer in quantized.layers if layer in chosen]), config.algorithm
    )


def damages(quantized: QuantizedLayers) -> dict[QuantizedLayer, float]:
    """SQNR in dB of what each layer gives against the float model's, errors of the layers before included."""
    found = {}
    for visit in sweep(quantized, quantized.layers, required(quantized.data, quantized)):
        comparison = Comparison()
        for expected, given in zip(visit.outputs, visit.quantized_outputs(), strict=True):
            comparison.update(np.asarray(expected), given)
        found[visit.layer] = comparison.sqnr
    return found
