"""Trials: what one choice of settings does to the outputs of a model, and to the bytes of its weights.

A trial quantizes a copy of the float model. All share one pass of calibration and one run of the float model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from quark.core.array import NumpyArray
from quark.core.dtypes import MICRO_EXPONENT
from quark.core.granularity import PerGroup
from quark.core.metrics import Comparison, Metric, kl
from quark.core.spec import TensorSpec
from quark.errors import ConfigError
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.float_outputs import FloatOutputs
from quark.onnx.calibration.statistics import Statistics
from quark.onnx.config.settings import Settings
from quark.onnx.decide import decide, write
from quark.onnx.graph.model_file import constant, to_proto
from quark.onnx.graph.sessions import open_session
from quark.onnx.placement.place import place
from quark.onnx_ops.saving import weight_bytes

Distance = Callable[[Iterable[tuple[NumpyArray, NumpyArray]]], float]
"""(float output, quantized output) of each sample -> distance; less is better."""


def mean_distance(name: str) -> Distance:
    """The mean over samples of a distance by name; infinite where an output is not finite."""
    distance = kl if name == "kl" else partial(_metric_distance, Metric(name))

    def measure(outputs: Iterable[tuple[NumpyArray, NumpyArray]]) -> float:
        distances = [distance(x, y) if np.isfinite(y).all() else math.inf for x, y in outputs]
        return sum(distances) / len(distances)

    return measure


def _metric_distance(metric: Metric, x: NumpyArray, y: NumpyArray) -> float:
    return metric.distance(metric.of(Comparison().update(x, y)))


@dataclass
class Trials:
    """Tries settings on one model.

    Attributes:
        model: The float model, never changed.
        data: The samples; all are calibrated on.
        count: How many of them outputs are compared on.
        output: Name of the output that is compared.
        distance: Of the quantized outputs from the float ones.
        threads: Threads of each run.
    """

    model: ir.Model
    data: Samples
    count: int
    output: str
    distance: Distance
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    _statistics: Statistics = field(default_factory=lambda: Statistics(""))

    def __post_init__(self) -> None:
        self._expected = FloatOutputs(self.model, [self.output], self.data, self._open_session, self.count)

    def score(self, settings: Settings, count: int | None = None) -> float:
        """The distance of the outputs of the quantized model; infinite where they are not a number.

        Args:
            settings: What is quantized.
            count: How many samples are run, from the first; None for all.

        Raises:
            ConfigError: The distance is something else.
        """
        model = self.model.clone()
        write(decide(model, settings, self.data, statistics=self._statistics))
        distance = self.distance(pair for (pair,) in self._expected.beside(model, count))
        try:
            score = float(distance)
        except (TypeError, ValueError):
            raise ConfigError(f"The metric of the outputs gave {distance!r}, and must give one number.") from None
        return math.inf if math.isnan(score) else score

    def _open_session(self, model: ir.Model) -> AbstractContextManager[onnxruntime.InferenceSession]:
        return nullcontext(open_session(to_proto(model), threads=self.threads, in_float=True))


def stored_bytes(model: ir.Model, settings: Settings) -> float:
    """Bytes of all constants of the quantized model, without scales.

    A block format counts with its shared exponents; a constant that is read under two types counts twice.
    """
    placement = place(model.clone(), settings)
    coded: dict[tuple[str, str], float] = {}
    for (node, index), spec in placement.weights.items():
        value = node.inputs[index]
        coded[getattr(value, "name", None) or "", str(spec.dtype)] = constant(value).size * _bits(spec) / 8
    initializers = model.graph.initializers
    floats = {name: initializers[name].const_value for name, _ in coded if name in initializers}
    return weight_bytes(model) - sum(tensor.nbytes for tensor in floats.values() if tensor) + sum(coded.values())


def _bits(spec: TensorSpec) -> float:
    """Bits of a value, shared exponents included."""
    shared = 8 / spec.granularity.size if spec.is_block and isinstance(spec.granularity, PerGroup) else 0.0
    return spec.dtype.bits + shared + (0.5 if spec.dtype.name in MICRO_EXPONENT else 0.0)


def distance_of(distance_fn: Any, evaluate_fn: Any, default: str) -> Distance:
    """The distance that a config asks for.

    Args:
        distance_fn: (float outputs, quantized outputs) -> distance; each a list of samples, a sample a list of arrays.
        evaluate_fn: Instead: outputs -> how good they are.
        default: Instead: a name.
    """
    if distance_fn is None and evaluate_fn is None:
        return mean_distance(default)

    def measure(outputs: Iterable[tuple[NumpyArray, NumpyArray]]) -> float:
        before, after = zip(*(([np.asarray(x)], [np.asarray(y)]) for x, y in outputs), strict=True)
        if distance_fn is not None:
            return distance_fn(list(before), list(after))
        return evaluate_fn(list(before)) - evaluate_fn(list(after))

    return measure
