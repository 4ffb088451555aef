"""The score of a quantized model: one number, from its outputs for samples that it was not made with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quark.core.metrics import Comparison
from quark.errors import ConfigError, NotSupportedError, did_you_mean
from quark.onnx.calibration.calibrate import model_session
from quark.onnx.calibration.data.samples import Samples, Store
from quark.onnx.config.settings import Settings
from quark.onnx.graph.sessions import run_sample

UNITS = {"sqnr": "dB", "psnr": "dB", "cosine": "", "l2": ""}
FALLS = frozenset({"l2"})
"""Metrics that are the better the smaller they are."""


@dataclass(frozen=True)
class Metric:
    """A property of `Comparison`, and which way it improves. Raises ConfigError for an unknown name."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in UNITS:
            raise ConfigError(f"There is no metric {self.name!r}. {did_you_mean(self.name, UNITS)}")

    def of(self, found: Comparison) -> float:
        """The value; the worst there is where it is not a number."""
        value: float = getattr(found, self.name)
        return value if not math.isnan(value) else self.worst

    @property
    def worst(self) -> float:
        """What nothing is worse than."""
        return math.inf if self.name in FALLS else -math.inf

    def better(self, one: float, other: float) -> bool:
        """Whether one value is better than another."""
        return one < other if self.name in FALLS else one > other

    def power(self, value: float, samples: int) -> float:
        """The share of noise that a value stands for, or the squared distance for each sample: less is better."""
        if self.name in FALLS:
            return value**2 / samples
        return float(10 ** (-value / 10)) if UNITS[self.name] else 1 - value

    def text(self, value: float) -> str:
        """The value with its unit."""
        digits = f"{value:.2f}" if UNITS[self.name] else f"{value:.6g}"
        return f"{digits} {UNITS[self.name]}".rstrip()


class Judge:
    """Runs models on the same samples and compares what they give with what the float model gives.

    Args:
        reference: The float model, run once.
        data: The samples.
        metric: Of each float output over all samples; the worst output counts.
        settings: The execution providers.

    Raises:
        NotSupportedError: The model has no float output.
    """

    def __init__(self, reference: ir.Model, data: Samples, metric: Metric, settings: Settings) -> None:
        self.data, self.metric, self._settings, self._expected = data, metric, settings, Store()
        floats = ("FLOAT", "FLOAT16", "DOUBLE")
        outputs = [value for value in reference.graph.outputs if value.dtype is not None and value.dtype.name in floats]
        self._names = [value.name or "" for value in outputs]
        if not outputs:
            raise NotSupportedError("The model has no float output, so there is nothing to judge quantized models by.")
        with model_session(reference, [], settings) as session:
            for position, feed in enumerate(data):
                for name, array in zip(self._names, run_sample(session, self._names, feed), strict=True):
                    self._expected[position, name] = array

    def score(self, model: ir.Model) -> tuple[float, str]:
        """The metric and the name of the worst output.

        Raises:
            NotSupportedError: The shape of an output follows from values.
        """
        found = {name: Comparison() for name in self._names}
        with model_session(model, [], self._settings) as session:
            for position, feed in enumerate(self.data):
                for name, array in zip(self._names, run_sample(session, self._names, feed), strict=True):
                    expected = self._expected[position, name]
                    if expected.shape != array.shape:
                        raise NotSupportedError(
                            f"The output {name} is {list(array.shape)} instead of {list(expected.shape)}: its shape "
                            "follows from values, so that quantized models cannot be judged by it."
                        )
                    with np.errstate(invalid="ignore", over="ignore"):
                        found[name].update(expected, array)
        values = {name: self.metric.of(each) for name, each in found.items()}
        worst = (max if self.metric.name in FALLS else min)(values, key=lambda name: values[name])
        return values[worst], worst
