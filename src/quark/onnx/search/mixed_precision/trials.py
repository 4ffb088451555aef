"""Trials: what one choice of settings does to the outputs of a model, and to the bytes of its weights.

A trial is a run of one model that all share, which is fed with what was decided; where more than numbers differ, it
quantizes a copy of the float model. All share one pass of calibration and one run of the float model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import onnx
import onnx_ir as ir
import onnxruntime

from quark.core.array import NumpyArray
from quark.core.dtypes import MICRO_EXPONENT
from quark.core.granularity import PerGroup
from quark.core.spec import TensorSpec
from quark.errors import ConfigError
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.float_outputs import FloatOutputs
from quark.onnx.calibration.statistics import Statistics
from quark.onnx.config.settings import Settings
from quark.onnx.decide import Decision, decide, write
from quark.onnx.graph.model_file import constant, to_proto
from quark.onnx.graph.sessions import open_session
from quark.onnx.placement.place import place
from quark.onnx.search.evaluator import OutputDistance
from quark.onnx.search.mixed_precision.switched import SwitchedModel, state_of, switchable
from quark.onnx_ops.saving import weight_bytes


@dataclass
class Trials:
    """Tries settings on one model.

    Attributes:
        model: The float model, never changed.
        data: The samples; all are calibrated on.
        count: How many of them outputs are compared on.
        output: Name of the output that is compared.
        distance: Of the quantized outputs from the float ones.
        statistics: Of calibration; read, and completed.
        threads: Threads of each trial.
    """

    model: ir.Model
    data: Samples
    count: int
    output: str
    distance: OutputDistance
    statistics: Statistics = field(default_factory=lambda: Statistics(""))
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    _switched: SwitchedModel | None = None

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
        count = self.count if count is None else min(count, self.count)
        distance = self.distance(pair for (pair,) in self._expected.paired(self._outputs(settings, count)))
        try:
            score = float(distance)
        except (TypeError, ValueError):
            raise ConfigError(f"The metric of the outputs gave {distance!r}, and must give one number.") from None
        return math.inf if math.isnan(score) else score

    def share(self, settings: Sequence[Settings]) -> None:
        """Build the model that trials share, if they can.

        Args:
            settings: Of which the trials will take some tensors as the first has them, and the others as another has.
        """
        if not all(switchable(self.model, each) for each in settings):
            return
        first, *others = [self._decide(each) for each in settings]
        states = [state_of(other) for other in others]
        state = state_of(first)
        if state is not None and all(other is not None and other.keys() == state.keys() for other in states):
            found = [other for other in states if other is not None]
            self._switched = SwitchedModel(first, state, found, self.output, self.data, self._open_part)

    def _decide(self, settings: Settings) -> Decision:
        return decide(self.model, settings, self.data, statistics=self.statistics, fold=False)

    def _outputs(self, settings: Settings, count: int) -> Iterator[list[NumpyArray]]:
        """The output of the quantized model for each sample."""
        if self._switched is not None:
            decision = self._decide(settings)
            state = state_of(decision)
            if state is not None and self._switched.fits(decision, state):
                return self._switched.run(decision, state, count, self.threads)
        model = self.model.clone()
        write(decide(model, settings, self.data, statistics=self.statistics))
        return ([array] for ((_, array),) in self._expected.beside(model, count))

    def _open_part(self, proto: onnx.ModelProto, weights: Mapping[str, NumpyArray]) -> onnxruntime.InferenceSession:
        # Samples run beside each other instead.
        return open_session(proto, threads=1, in_float=True, weights=weights)

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
