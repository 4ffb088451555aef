"""A layer keeps what an algorithm did to its weight only where its quantized output came no further from the float one.

    error = sqrt( sum |Q(layer)(x~) - layer(x)|^2 / sum |layer(x)|^2 )

over a few samples: x is what the layer reads in the float model, x~ what the quantized model as it is by then gives it.
A solver that makes the most of x~ may move the output away from what the float model gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import numpy as np

from quark.base.log import logger
from quark.base.progress import report
from quark.onnx.algorithms.layer_sweep import Visit
from quark.onnx.algorithms.quantized_layers import QuantizedLayers

SAMPLES = 4
"""How many samples are compared; the layer is run twice on each."""
RELATIVE_ERROR = "relative error of the output"
"""|y - y_float| / |y_float| over these samples."""


@contextmanager
def keeping_better(quantized: QuantizedLayers, visit: Visit, algorithm: str) -> Iterator[None]:
    """Within: an algorithm changes the weight of a layer, or its scale; both are as they were if that is worse.

    Args:
        quantized: The models.
        visit: The layer, reached.
        algorithm: Its name, for the log, which says both errors.
    """
    layer = visit.layer
    weight, params, before = layer.weight.copy(), layer.params, output_error(visit)
    yield
    after = output_error(visit)
    kept = after <= before
    if not kept:
        layer.weight = weight
        layer.params = quantized.decision.qparams.weights[layer.node, layer.index] = params
    # One that is left as it was has the error that it had.
    report(layer.name, before, after if kept else before, RELATIVE_ERROR)
    what = "kept" if kept else "left as it was"
    logger.info("%s: output error %.4g to nearest, %.4g with %s: %s.", layer.name, before, after, algorithm, what)


def output_error(visit: Visit) -> float:
    """The error of a layer as it is now."""
    noise = signal = 0.0
    for index, output in enumerate(islice(visit.quantized_outputs(), SAMPLES)):
        expected = np.asarray(visit.outputs[index], np.float64)
        noise += float(np.square(output - expected).sum())
        signal += float(np.square(expected).sum())
    return float(np.sqrt(noise / max(signal, float(np.finfo(np.float32).tiny))))
