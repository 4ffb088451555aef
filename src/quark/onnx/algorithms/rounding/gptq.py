"""GPTQ on the weights of MatMul and Gemm, layer after layer; the algebra is in `core/solvers/gptq.py`.

The second moments are of what the quantized model feeds a layer, layers before already solved, over all samples.
Layers that read one tensor share them and their factor.

A layer keeps what an algorithm did to its weight only where its quantized output came no further from the float one.

    error = sqrt( sum |Q(layer)(x~) - layer(x)|^2 / sum |layer(x)|^2 )

over a few samples: x is what the layer reads in the float model, x~ what the quantized model as it is by then gives it.
A solver that makes the most of x~ may move the output away from what the float model gives.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np
import onnx_ir as ir

from quark.base.log import logger
from quark.base.progress import report
from quark.core.array import NumpyArray
from quark.core.granularity import PerGroup, PerTensor
from quark.core.quantize import elementwise
from quark.core.scales import QParams, round_scale
from quark.core.solvers import gptq
from quark.core.solvers.columns.columns import ColumnGrid
from quark.core.solvers.importance import weighted_qparams
from quark.core.solvers.refine import refine
from quark.core.spec import ScaleType
from quark.errors import CalibrationError
from quark.onnx.algorithms.layer_sweep import Visit, sweep
from quark.onnx.algorithms.quantized_layers import QuantizedLayer, QuantizedLayers
from quark.onnx.calibration.data.samples import required
from quark.onnx.config.algo_configs import GPTQConfig
from quark.onnx.operators import PRODUCTS, output_axis

_CONTINUOUS = (ScaleType.float32, ScaleType.float16, ScaleType.int16)
REFINEMENTS = 1
"""How often all columns are visited again."""


def solve_weights(quantized: QuantizedLayers, config: GPTQConfig) -> int:
    """Round the integer matrices that one layer reads, unless nearest is better; return how many there are.

    Raises:
        CalibrationError: No data, or none that reaches a layer; NaN among what it reads.
    """
    data = required(quantized.data, config)
    own = [x for x in quantized.layers if x.spec.has_zero_point and not x.shared and x.node.op_type in PRODUCTS]
    layers = [x for x in own if x.weight.ndim == 2 and not x.node.attributes.get_int("transA", 0)]
    problems: dict[ir.Value, Problem] = {}
    left = Counter(quantized.input_of(layer) for layer in layers)
    for visit in sweep(quantized, layers, data):
        layer, value = visit.layer, quantized.input_of(visit.layer)
        with naming(layer):
            if value not in problems:
                problems[value] = Problem.of(visit.inputs, config)
            with _keeping_better(quantized, visit, config.name):
                solve_layer(quantized, layer, problems[value], config.mse)
        left[value] -= 1
        if not left[value]:
            del problems[value]
    return len(layers)


@dataclass
class Problem:
    """The problem that all layers which read one tensor solve.

    Attributes:
        order: The column that `feedback` and `importance` have at each place.
        feedback, importance: F and d of the Hessian's factor, in this order.
        hessian: Damped, in natural order, float32.
    """

    order: NumpyArray
    feedback: NumpyArray
    importance: NumpyArray
    hessian: NumpyArray

    @classmethod
    def of(cls, inputs: Sequence[NumpyArray], config: GPTQConfig) -> Problem:
        """The problem of a tensor, sample by sample. Raises CalibrationError for one without rows."""
        columns, rows = inputs[0].shape[-1], 0
        gram = np.zeros((columns, columns), np.float32)
        for x in inputs:
            x = np.asarray(x, np.float32).reshape(-1, columns)
            gram += x.T @ x
            rows += len(x)
        if not rows:
            raise CalibrationError("GPTQ needs at least one row of inputs, the samples have none.")
        order = gptq.importance_order(gram) if config.act_order else np.arange(len(gram))
        needed = gptq.damping_at_least(config.perc_damp, gram.diagonal(), rows)
        feedback, importance, damp = gptq.factor(gram[order[:, None], order], float(needed))
        return cls(order, feedback.astype(np.float32), importance, gptq.damped(gram, damp, "float32"))


def solve_layer(quantized: QuantizedLayers, layer: QuantizedLayer, problem: Problem, fit: bool) -> None:
    """Set the weight of a layer to values on its grid; with `fit`, on one whose scales lose least."""
    goal = _columns(layer, layer.weight)
    if fit:
        importance = np.empty(len(goal), np.float32)
        importance[problem.order] = problem.importance
        shape = (1, -1) if _rows_are_outputs(layer) else (-1, 1)
        quantized.set_params(layer, weighted_qparams(layer.weight, importance.reshape(shape), layer.spec))
    solved = gptq.solve(goal[problem.order], problem.feedback, _grid(layer, problem.order))
    natural = np.empty_like(solved)
    natural[problem.order] = solved
    grid = _grid(layer, np.arange(len(goal)))
    if fit and not isinstance(layer.spec.granularity, PerTensor) and layer.spec.scale_type in _CONTINUOUS:
        scales = _FittedScales(layer, grid)
        natural = refine(goal, natural, problem.hessian, grid, REFINEMENTS, scales.size, scales.fit)
        quantized.set_params(layer, scales.params())
    else:
        natural = refine(goal, natural, problem.hessian, grid, REFINEMENTS)
    layer.weight = _columns(layer, natural)


def _grid(layer: QuantizedLayer, order: NumpyArray) -> ColumnGrid:
    parts = elementwise(layer.params, layer.spec, layer.weight.shape)
    scale, zero = (None if part is None else _columns(layer, np.asarray(part))[order] for part in parts)
    assert scale is not None
    return ColumnGrid(layer.spec, scale, zero)


class _FittedScales:
    """The scales of a layer, (output channels, groups), which are fitted to the codes of a solution group by group."""

    def __init__(self, layer: QuantizedLayer, grid: ColumnGrid) -> None:
        self.layer, self.grid, split = layer, grid, layer.spec.granularity
        columns = grid.scale.shape[0]
        self.size = split.size if isinstance(split, PerGroup) else columns
        self.stored = np.asarray(layer.params.scale).copy()
        self.by_row = self.stored.ndim == 1 or _rows_are_outputs(layer)
        own = self.stored.reshape(len(self.stored), -1)
        self.scale = own if self.by_row else own.T

    def fit(self, group: int, factor: NumpyArray) -> NumpyArray:
        """Multiply the scales of a group; the factors that are left when they are rounded."""
        before = self.scale[:, group].copy()
        fitted = round_scale(before * factor, self.layer.spec, "float32").astype(np.float32)
        self.scale[:, group] = fitted
        self.grid.scale[group * self.size : (group + 1) * self.size] = fitted
        return fitted / before

    def params(self) -> QParams:
        """As the layer stores them."""
        return QParams(self.stored, self.layer.params.zero_point)


def _rows_are_outputs(layer: QuantizedLayer) -> bool:
    """Return True where the rows of the weight are output channels, as with transB."""
    return output_axis(layer.counterpart) == 0


def _columns(layer: QuantizedLayer, matrix: NumpyArray) -> NumpyArray:
    """A matrix with a row for each input channel, from the layer's own layout; or back."""
    return np.ascontiguousarray(matrix.T if _rows_are_outputs(layer) else matrix)


@contextmanager
def naming(layer: QuantizedLayer) -> Iterator[None]:
    """Calibration errors name the layer, and the damping as it is called here."""
    try:
        yield
    except CalibrationError as error:
        text = str(error).replace("damp_percent", "perc_damp")
        raise CalibrationError(f"{layer.name}: {text}") from None


# Keeping what is better -----------------------------------------------------------------------------------------------


SAMPLES = 4
"""How many samples are compared; the layer is run twice on each."""
_RELATIVE_ERROR = "relative error of the output"
"""|y - y_float| / |y_float| over these samples."""


@contextmanager
def _keeping_better(quantized: QuantizedLayers, visit: Visit, algorithm: str) -> Iterator[None]:
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
    report(layer.name, before, after if kept else before, _RELATIVE_ERROR)
    level, what = (logging.DEBUG, "kept") if kept else (logging.INFO, "left as it was")
    logger.log(level, "%s: output error %.4g to nearest, %.4g with %s: %s.", layer.name, before, after, algorithm, what)


def output_error(visit: Visit) -> float:
    """The error of a layer as it is now."""
    noise = signal = 0.0
    for index, output in enumerate(islice(visit.quantized_outputs(), SAMPLES)):
        expected = np.asarray(visit.outputs[index], np.float64)
        noise += float(np.square(output - expected).sum())
        signal += float(np.square(expected).sum())
    return float(np.sqrt(noise / max(signal, float(np.finfo(np.float32).tiny))))
