"""Trials: what one choice of settings does to the outputs of a model, and to the bytes of its weights.

A trial quantizes a copy of the float model. All share one pass of calibration and one run of the float model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.core.dtypes import MICRO_EXPONENT
from quark.core.granularity import PerGroup
from quark.core.metrics import cosine, kl, l2, psnr, sqnr
from quark.core.spec import TensorSpec
from quark.errors import ConfigError
from quark.onnx.calibration.data.samples import Samples, Store
from quark.onnx.calibration.statistics import Statistics
from quark.onnx.config.settings import Settings
from quark.onnx.decide import decide, write
from quark.onnx.graph.model_file import constant, to_proto, weight_bytes
from quark.onnx.graph.sessions import open_session, run_sample
from quark.onnx.placement.place import place

Distance = Callable[[Iterator[NumpyArray], Iterator[NumpyArray]], float]
"""(float outputs, quantized outputs), one of each sample -> distance; less is better."""

DISTANCES: dict[str, Callable[[NumpyArray, NumpyArray], float]] = {
    "l2": l2,
    "kl": kl,
    "cosine": lambda x, y: 1 - cosine(x, y),
    "sqnr": lambda x, y: -sqnr(x, y),
    "psnr": lambda x, y: -psnr(x, y),
}


def mean_distance(name: str) -> Distance:
    """The mean over samples of a distance by name; infinite where an output is not finite."""

    def measure(before: Iterator[NumpyArray], after: Iterator[NumpyArray]) -> float:
        found = [
            DISTANCES[name](x, y) if np.isfinite(y).all() else math.inf for x, y in zip(before, after, strict=True)
        ]
        return sum(found) / len(found)

    return measure


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
    _outputs: Store = field(default_factory=Store)

    def __post_init__(self) -> None:
        for sample, array in enumerate(self._run(self.model)):
            self._outputs[sample] = array

    def score(self, settings: Settings) -> float:
        """The distance of the outputs of the quantized model; infinite where they are not a number.

        Raises:
            ConfigError: The distance is something else.
        """
        model = self.model.clone()
        write(decide(model, settings, self.data, statistics=self._statistics))
        found = self.distance((self._outputs[sample] for sample in range(self.count)), self._run(model))
        try:
            score = float(found)
        except (TypeError, ValueError):
            raise ConfigError(f"The metric of the outputs gave {found!r}, and must give one number.") from None
        return math.inf if math.isnan(score) else score

    def _run(self, model: ir.Model) -> Iterator[NumpyArray]:
        session = open_session(to_proto(model), threads=self.threads, in_float=True)
        for sample in range(self.count):
            yield run_sample(session, [self.output], self.data[sample])[0]


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
    """The distance that a config asks for."""

    def listed(outputs: Iterator[NumpyArray]) -> list[list[NumpyArray]]:
        return [[np.asarray(array)] for array in outputs]

    if distance_fn is not None:
        return lambda before, after: distance_fn(listed(before), listed(after))
    if evaluate_fn is not None:
        return lambda before, after: evaluate_fn(listed(before)) - evaluate_fn(listed(after))
    return mean_distance(default)
