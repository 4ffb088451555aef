"""Qparams: scale and zero point of everything that a placement quantizes, known before anything is written.

Activations get theirs from statistics, weights from their own values. An int32 bias has none of its own:
scale = input scale * weight scale, taken when it is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray, row_chunks
from quark.core.granularity import PerChannel, PerTensor
from quark.core.observers import OBSERVERS, Observer
from quark.core.observers.entropy import EntropyObserver
from quark.core.observers.layerwise_percentile import LayerwisePercentileObserver
from quark.core.observers.min_max import MinMaxObserver
from quark.core.observers.moving_average import MovingAverageObserver
from quark.core.observers.percentile import PercentileObserver
from quark.core.observers.power_of_two import PowerOfTwoMSEPercentileObserver
from quark.core.quantize import elementwise, quantize
from quark.core.scales import EPS, TINY, QParams, nearest_fraction
from quark.core.solvers import hqq
from quark.core.solvers.kernel_sums import balance_sums
from quark.core.spec import ScaleType, TensorSpec
from quark.errors import CalibrationError, NonFiniteError, QuarkError
from quark.onnx.calibration.statistics import Statistics
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import dims
from quark.onnx.graph.model_file import constant
from quark.onnx.placement.placement import Placement

CHUNK_BYTES = 1 << 22
_LEAST_LIFTED = 2.0**-100
"""A weight of smaller values would have scales near the smallest normal float32."""
CAST = QParams(np.ones((), np.float32))
"""Of a plain cast, and in the place of what a block format finds for each block."""


@dataclass
class ModelQParams:
    """Scale and zero point of all that one model has quantized.

    Attributes:
        activations: The tensor that stands for a class -> its scale and zero point.
        weights: (node, input index) -> scale and zero point.
    """

    activations: dict[ir.Value, QParams] = field(default_factory=dict)
    weights: dict[tuple[ir.Node, int], QParams] = field(default_factory=dict)


def make_observer(spec: TensorSpec, settings: Settings, *, weight: bool = False) -> Observer:
    """The statistic that a spec asks for; `symmetric_range` is about activations."""
    asked = settings.calibration
    symmetric_range = None if weight else asked.symmetric_range
    if spec.observer == "min_max":
        return MinMaxObserver(spec, bool(symmetric_range))
    if spec.observer == "moving_average":
        return MovingAverageObserver(spec, bool(symmetric_range))
    if spec.observer == "percentile":
        return PercentileObserver(spec, asked.percentile, symmetric_range)
    if spec.observer == "entropy":
        return EntropyObserver(spec, asked.entropy_levels)
    if spec.observer == "pof2_mse_percentile":
        return PowerOfTwoMSEPercentileObserver(spec, asked.percentile)
    if spec.observer == "layerwise_percentile":
        candidates, metric = asked.percentile_candidates, asked.percentile_metric
        return LayerwisePercentileObserver(spec, candidates, metric, symmetric_range)
    return OBSERVERS[spec.observer](spec)


def weight_params(
    placement: Placement, settings: Settings, statistics: Statistics | None = None
) -> dict[tuple[ir.Node, int], QParams]:
    """Scale and zero point of every weight that has one; a constant that several nodes read is looked at once.

    Args:
        placement: Which weights, with which spec.
        settings: How ranges are found.
        statistics: Statistics in memory: what one decision found of a constant, the next need not.

    Raises:
        NonFiniteError: A weight holds NaN or Inf.
        CalibrationError: All values of a weight, which is not zero, are below the normal float32.
    """
    known = {} if statistics is None else statistics.weights
    found: dict[tuple[ir.Node, int], QParams] = {}
    for (node, index), spec in placement.weights.items():
        value = node.inputs[index]
        # Clones of a model share these; the entry keeps it, so that no other gets its id.
        tensor = value.const_value if value is not None and value.const_value is not None else value
        key = (id(tensor), spec, settings.calibration.of_one_tensor)
        if key not in known:
            name = f"The weight {value.name if value is not None else index} of {node.name}"
            known[key] = tensor, _weight_qparams(constant(value), spec, settings, name)
        found[node, index] = known[key][1]
    return found


def _weight_qparams(weight: NumpyArray, spec: TensorSpec, settings: Settings, name: str) -> QParams:
    """Scale and zero point of one weight; `name` is for errors."""
    array = np.asarray(weight, np.float32)
    if spec.is_cast or spec.is_block:
        if not np.isfinite(array).all():
            raise NonFiniteError(f"{name} holds NaN or Inf.")
        refuse_subnormal(float(abs(array).max(initial=0)), f"The values of {name[0].lower()}{name[1:]}")
        return CAST
    observer = make_observer(spec, settings, weight=True)
    # Where the smallest scale would cost the weight its codes, a power of two lifts it, which the scale takes back.
    lift, most, enough = np.float32(1), float(abs(array).max(initial=0)), EPS * (spec.dtype.max - spec.dtype.min)
    if spec.scale_type in (ScaleType.float, ScaleType.float32) and _LEAST_LIFTED < most < enough:
        lift = np.float32(2.0 ** math.ceil(math.log2(enough / most)))
    observer.update(array if lift == 1 else array * lift)
    try:
        amax = largest(observer)
        refuse_subnormal(None if amax is None else amax / float(lift), "its values")
        found = observer.qparams()
        if lift != 1:
            found = replace(found, scale=found.scale / lift)
        # Float zero points are those of MatMulNBits nodes that HQQ solves.
        return hqq.solve(array, found, spec) if spec.float_zero_point else found
    except NonFiniteError:
        raise NonFiniteError(f"{name} holds NaN or Inf.") from None
    except QuarkError as error:
        raise type(error)(f"{name}: {error}") from None


def largest(observer: Observer) -> float | None:
    """The largest magnitude that was seen; None where an observer keeps none."""
    sides = [np.asarray(side) for side in (observer.low, observer.high) if side is not None]
    return max((float(abs(side).max(initial=0)) for side in sides), default=None)


def refuse_subnormal(amax: float | None, what: str) -> None:
    """Raise CalibrationError for values that are not all zero, and all below the normal float32.

    They have lost digits already, and nothing divides them. Zeros are exact under any scale.
    """
    if amax is not None and 0 < amax < TINY:
        raise CalibrationError(
            f"{what} are below {TINY:.2g}, the smallest normal float32, and not all zero: no scale divides them. "
            "Possible: exclude the nodes that read it, or scale the model."
        )


def onnx_range(spec: TensorSpec | None) -> TensorSpec | None:
    """A symmetric signed integer spec with the range [-max, max] that ONNX tools use: scale = amax / max."""
    if spec is None or not spec.has_zero_point or not spec.symmetric or not spec.dtype.signed:
        return spec
    return replace(spec, dtype=replace(spec.dtype, min=-spec.dtype.max))


def rescaled(params: QParams, spec: TensorSpec, scale: NumpyArray) -> QParams:
    """QParams with another scale; an asymmetric zero point goes where the smallest value stays in the range."""
    scale, zero = np.asarray(scale, np.float32), params.zero_point
    if np.array_equal(scale, params.scale):
        return params
    if zero is not None and not spec.symmetric:
        low = (spec.dtype.min - np.asarray(zero, np.float64)) * params.scale
        zero = np.clip(spec.dtype.min - np.rint(low / scale), spec.dtype.min, spec.dtype.max).astype(np.float32)
    return replace(params, scale=scale, zero_point=zero)


def widen_softmax(placement: Placement, activations: dict[ir.Value, QParams]) -> None:
    """Keep the scale of 8-bit outputs of Softmax within the reach of ONNX Runtime's integer kernel.

    It computes exp(x) * (1 / scale) / sum in 32 bits, of which exp(x) takes what the length of the axis leaves. From
    measurements on 1.31: right up to 1 / scale = 128 * length, and nothing but overflow from 150 * length on.
    """
    for node in placement.nodes:
        output = node.outputs[0]
        spec = placement.activations.get(output)
        if node.op_type != "Softmax" or spec is None or not spec.has_zero_point or spec.dtype.bits != 8:
            continue
        sizes = dims(output)
        length = sizes[node.attributes.get_int("axis", -1)] if sizes else None
        root = placement.root(output)
        # A power of two, which every kind of scale may be; an open axis may be as short as two.
        least = 2.0 ** -int(np.log2(128 * max(2, length or 2)))
        activations[root] = rescaled(activations[root], spec, np.maximum(activations[root].scale, least))


def channel_bias(bias: NumpyArray, scale: NumpyArray) -> tuple[NumpyArray, NumpyArray]:
    """A bias (..., channels) in float32 and the scale of its weight, one for all or one for each channel.

    A bias that is one for all channels is repeated; so are scales that the groups of a ConvTranspose share.
    """
    bias = np.asarray(bias, np.float32)
    if np.ndim(scale) == 0:
        return bias, scale
    channels = bias.shape[-1] if bias.ndim else 1
    scale = np.tile(scale, max(1, channels // len(scale)))
    return np.broadcast_to(bias, np.broadcast_shapes(bias.shape, scale.shape)), scale


def largest_bias(bias: NumpyArray, scale: NumpyArray) -> Any:
    """The largest magnitude under each scale."""
    return np.abs(bias).max(axis=tuple(range(bias.ndim - np.ndim(scale))), initial=0)


def scale_for_bias(bias: NumpyArray, scale: NumpyArray, data_scale: NumpyArray) -> NumpyArray:
    """The smallest scale of a weight, in the shape of the one it has, under which an int32 bias fits."""
    largest = largest_bias(*channel_bias(bias, scale))
    if np.ndim(scale):
        largest = largest.reshape(-1, len(scale)).max(0)
    # In float32 2^31 - 1 is 2^31: a margin of one step of float32.
    return np.asarray(np.asarray(largest, np.float64) / ((2**31 - 2**8) * np.asarray(data_scale, np.float64)))


def fit_int32_biases(placement: Placement, qparams: ModelQParams) -> None:
    """Enlarge the scale of every weight under which its int32 bias would not fit: |bias| <= (2^31 - 1) s_in s_w."""
    for (node, index), weight in placement.weights_of_biases.items():
        data = weight[0].inputs[0]
        source = None if data is None else qparams.activations.get(placement.root(data))
        if source is None or weight not in qparams.weights:
            continue
        params = qparams.weights[weight]
        needed = scale_for_bias(constant(node.inputs[index]), params.scale, source.scale)
        if placement.weights[weight].scale_type is ScaleType.pof2:
            needed = np.exp2(np.ceil(np.log2(np.maximum(needed, params.scale))))
        if placement.weights[weight].scale_type is ScaleType.int16:
            # A step up of M, which has at least 2^14 steps from 1/4 on, so that rounding down still fits.
            needed = nearest_fraction(np.float32(needed) + np.maximum(np.float32(needed) * 2.0**-14, 2.0**-16))
        qparams.weights[weight] = rescaled(params, placement.weights[weight], np.maximum(params.scale, needed))


def encode(weight: NumpyArray, params: QParams, spec: TensorSpec, kind: Any) -> NumpyArray:
    """Codes of a weight in the numpy type `kind`; beyond the result, memory for a few rows only."""
    axis = spec.granularity.axis if isinstance(spec.granularity, PerChannel) else None
    if weight.ndim < 2 or not isinstance(spec.granularity, (PerTensor, PerChannel)):
        return np.asarray(quantize(np.asarray(weight, np.float32), params, spec)).astype(kind)
    codes = np.empty(weight.shape, kind)
    for rows in row_chunks(len(weight), 4 * weight[0].size, CHUNK_BYTES):
        part = params
        if axis == 0 and np.ndim(params.scale):
            zero = None if params.zero_point is None else params.zero_point[rows]
            part = QParams(params.scale[rows], zero)
        codes[rows] = quantize(np.asarray(weight[rows], np.float32), part, spec)
    return codes


def balanced(codes: NumpyArray, weight: NumpyArray, params: QParams, spec: TensorSpec) -> NumpyArray:
    """Codes (channels, 1, ...) of depthwise kernels whose errors cancel: see `core/solvers/kernel_sums.py`."""
    scale, zero = elementwise(params, spec, weight.shape)
    exact = np.asarray(weight, np.float64) / scale + (0 if zero is None else zero)
    kernels = (len(weight), -1)
    limits = (spec.dtype.min, spec.dtype.max)
    return balance_sums(codes.reshape(kernels), exact.reshape(kernels), limits).reshape(codes.shape)
