"""EvalMetrics: how near the outputs of a quantized model are to those of the float model, sample by sample.

Cosine similarity and Euclidean (L2) distance of each float output for each sample: their means and their worst.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quark.core.metrics import Comparison
from quark.errors import NonFiniteError
from quark.onnx.calibration.calibrate import model_session
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.float_outputs import FloatOutputs
from quark.onnx.config.settings import Settings
from quark.onnx.search.score import float_outputs, same_shape


@dataclass(frozen=True)
class OutputMetrics:
    """What EvalMetrics found, over all samples and float outputs.

    Attributes:
        mean_cosine, min_cosine: Cosine similarity; 1 where both are alike.
        mean_l2, max_l2: Euclidean distance, in the unit of the outputs.
        samples: How many samples were run.
    """

    mean_cosine: float
    min_cosine: float
    mean_l2: float
    max_l2: float
    samples: int

    def __str__(self) -> str:
        return (
            f"cosine similarity {self.mean_cosine:.6g} (worst {self.min_cosine:.6g}), "
            f"L2 distance {self.mean_l2:.6g} (worst {self.max_l2:.6g}), over {self.samples} samples"
        )


def output_metrics(reference: ir.Model, model: ir.Model, data: Samples, settings: Settings) -> OutputMetrics:
    """Run both models on the data.

    Args:
        reference: The float model.
        model: What was made of it.
        data: The samples.
        settings: The execution providers.

    Raises:
        NotSupportedError: The model has no float output, or one whose shape follows from values.
        NonFiniteError: An output of the quantized model holds NaN or Inf where that of the float model does not.
    """
    expected = FloatOutputs(reference, float_outputs(reference), data, lambda each: model_session(each, [], settings))
    cosines, distances = [], []
    for outputs in expected.beside(model):
        for name, (x, y) in zip(expected.names, outputs, strict=True):
            same_shape(name, x, y)
            if not np.isfinite(y).all():
                raise NonFiniteError(
                    f"EvalMetrics: the output {name} holds NaN or Inf, which the float model's does not."
                )
            comparison = Comparison().update(x, y)
            cosines.append(comparison.cosine)
            distances.append(comparison.l2)
    return OutputMetrics(
        float(np.mean(cosines)), min(cosines), float(np.mean(distances)), max(distances), len(expected)
    )
