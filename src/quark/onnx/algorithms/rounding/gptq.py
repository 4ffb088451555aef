"""GPTQ on the weights of MatMul and Gemm, layer after layer; the algebra is in `core/solvers/gptq.py`.

The second moments are of what the quantized model feeds a layer, layers before already solved, over all samples.
Layers that read one tensor share them and their factor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.core.granularity import PerGroup, PerTensor
from quark.core.quantize import elementwise, quantize_elements
from quark.core.scales import QParams, round_scale
from quark.core.solvers import gptq
from quark.core.solvers.importance import weighted_qparams
from quark.core.spec import ScaleType
from quark.errors import CalibrationError
from quark.onnx.algorithms.layer_sweep import sweep
from quark.onnx.algorithms.quantized_layers import QuantizedLayer, QuantizedLayers
from quark.onnx.calibration.data.samples import required
from quark.onnx.config.algo_configs import GPTQConfig
from quark.onnx.operators.axes import output_axis

CONTINUOUS = (ScaleType.float32, ScaleType.float16, ScaleType.int16)
REFINEMENTS = 1
"""How often all columns are visited again."""


def solve_weights(quantized: QuantizedLayers, config: GPTQConfig) -> int:
    """Round the weights of every layer that qualifies; return how many there are.

    Raises:
        CalibrationError: No data, or none that reaches a layer; NaN among what it reads.
    """
    data = required(quantized.data, config)
    layers = [layer for layer in quantized.layers if _qualifies(layer)]
    problems: dict[ir.Value, Problem] = {}
    left = Counter(quantized.input_of(layer) for layer in layers)
    for visit in sweep(quantized, layers, data):
        layer, value = visit.layer, quantized.input_of(visit.layer)
        with naming(layer):
            if value not in problems:
                problems[value] = Problem.of(visit.inputs, config)
            solve_layer(quantized, layer, problems[value], config.mse)
        left[value] -= 1
        if not left[value]:
            del problems[value]
    return len(layers)


@dataclass
class Problem:
    """What layers that read one tensor have in common.

    Attributes:
        order: The column that is solved at each place.
        upper: Factor of the inverse Hessian, in this order.
        hessian: Damped, in this order, float32.
    """

    order: NumpyArray
    upper: NumpyArray
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
        gram = gram[order][:, order]
        upper, damp = gptq.inverse_factor(gram, config.perc_damp)
        return cls(order, upper, gptq.damped(gram, damp).astype(np.float32))


def solve_layer(quantized: QuantizedLayers, layer: QuantizedLayer, problem: Problem, fit: bool) -> None:
    """Set the weight of a layer to values on its grid; with `fit`, on one whose scales lose least."""
    goal = _columns(layer, layer.weight)[problem.order]
    if fit:
        importance = np.empty(len(goal), np.float32)
        importance[problem.order] = np.diagonal(problem.upper) ** -2.0
        shape = (1, -1) if _rows_are_outputs(layer) else (-1, 1)
        quantized.set_params(layer, weighted_qparams(layer.weight, importance.reshape(shape), layer.spec))
    solved = gptq.solve(goal, problem.upper, _grid(layer, problem.order))
    for _ in range(REFINEMENTS):
        if fit:
            _refit(quantized, layer, problem, goal, solved)
        solved = gptq.refine(goal, solved, problem.hessian, _grid(layer, problem.order), 1)
    back = np.empty_like(solved)
    back[problem.order] = solved
    layer.weight = _columns(layer, back)


def _grid(layer: QuantizedLayer, order: NumpyArray) -> gptq.Rounder:
    parts = elementwise(layer.params, layer.spec, layer.weight.shape)
    scale, zero = (None if part is None else _columns(layer, np.asarray(part))[order] for part in parts)
    assert scale is not None
    return lambda i, work: quantize_elements(work[i], scale[i], None if zero is None else zero[i], layer.spec)


def _refit(
    quantized: QuantizedLayers, layer: QuantizedLayer, problem: Problem, goal: NumpyArray, solved: NumpyArray
) -> None:
    """Fit the scales to the codes of a solution, where each is of one output channel and fine enough."""
    split, scale = layer.spec.granularity, np.asarray(layer.params.scale)
    if isinstance(split, PerTensor) or layer.spec.scale_type not in CONTINUOUS:
        return
    size = split.size if isinstance(split, PerGroup) else len(goal)
    factors = gptq.refit(goal, solved, problem.hessian, problem.order // size, -(-len(goal) // size))
    by_row = scale.ndim == 1 or _rows_are_outputs(layer)
    factor = (factors if by_row else factors.T).reshape(scale.shape)
    fitted = round_scale(scale * factor, layer.spec, "float32").astype(np.float32)
    quantized.set_params(layer, QParams(fitted, layer.params.zero_point))


def _qualifies(layer: QuantizedLayer) -> bool:
    """Whether a layer has a matrix of its own in integers."""
    matrix = layer.node.op_type in ("MatMul", "Gemm") and layer.weight.ndim == 2
    rows = not layer.node.attributes.get_int("transA", 0)
    return matrix and rows and layer.spec.has_zero_point and not layer.shared


def _rows_are_outputs(layer: QuantizedLayer) -> bool:
    """Whether the rows of the weight are output channels, as with transB."""
    return output_axis(layer.twin) == 0


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
