"""trials: what would be left of lost outputs in another quantization, tried in the time that there is.

A quick trial leaves out the algorithms and corrections of the quantization that lost the outputs, which take most of
its time: it finds nodes, and compares kinds of scales. What an error promises is the value of a whole one.

The outputs of the float model are those that calibration saw, and a trial that has lost everything ends after two
samples (`damage.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import onnx
import onnx_ir as ir

from quark.base.log import logger, severity
from quark.core.granularity import PerChannel
from quark.core.spec import LayerSpec, ScaleType
from quark.errors import QuarkError
from quark.onnx.calibration.data.inputs import Feed, model_inputs
from quark.onnx.calibration.data.readers import TimeUpError
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.calibration.statistics import Statistics, fingerprint
from quark.onnx.config.algo_configs import AdaQuantConfig, AdaRoundConfig, GPTQConfig
from quark.onnx.config.config import Config
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.presets import get_default_config
from quark.onnx.config.settings import Settings
from quark.onnx.flow.flow import finish
from quark.onnx.flow.prepare import prepare
from quark.onnx.graph.model_file import checked_proto, opset
from quark.onnx.operators.targets import TARGETS
from quark.onnx.passes.convert_nchw_to_nhwc import convert_nchw_to_nhwc
from quark.onnx.passes.convert_opset_version import convert_opset_version
from quark.onnx.passes.fix_shapes import fix_shapes
from quark.onnx.search.history import TimeBudget
from quark.onnx.search.lost_outputs.damage import SpreadSamples, damage
from quark.onnx.search.lost_outputs.verdict import KEPT, LEAST, Damage
from quark.onnx.search.settle import convert
from quark.onnx_ops.element_types import PER_CHANNEL_OPSET

CALIBRATED, CALIBRATED_WHOLE = 64, 8
"""Samples that a trial of other settings calibrates on, and one of another configuration: as few as correct biases."""

_MORE = 0.5
"""Share of the time that is left, which A16W8 may take in addition: stopped near its end, it says nothing."""

_CLEAR = 2.0
"""dB above the bound: a recognizer was promised 10.4 dB by a trial of few samples, the whole gave 9.1."""

Change = Callable[[Settings], Settings]


@dataclass(frozen=True)
class Tried:
    """A model that was tried.

    Attributes:
        model: It.
        left: Of its outputs.
        whole: Whether it was quantized with all algorithms and corrections.
    """

    model: onnx.ModelProto
    left: Damage
    whole: bool

    def is_enough(self, least: float) -> bool:
        """Return True where what is left is clearly more than a bound, in dB, or keeps the decisions."""
        kept = self.left.decisions is not None and self.left.decisions >= KEPT
        return not self.left.lost and (kept or self.left.sqnr >= least + _CLEAR)

    def __str__(self) -> str:
        return f"{self.left}{'' if self.whole else ', without the corrections, for which there was no time'}"


class Trials:
    """Quantizes a model in other ways, as often as there is time; the model is calibrated once.

    Args:
        model: The float model as it was loaded, which nothing changes.
        settings: Of the quantization that lost the outputs.
        feeds: Samples.
        budget: The time for all trials.
        kept: Where the samples are from: it may know the outputs of the float model.
        calibrated: Most samples that each calibrates on, spread over all.
        seconds: That the quantization took which lost the outputs.
    """

    def __init__(
        self,
        model: ir.Model,
        settings: Settings,
        feeds: Sequence[Feed],
        budget: TimeBudget,
        kept: SpreadSamples | None = None,
        calibrated: int = CALIBRATED,
        seconds: float = 0.0,
    ) -> None:
        self.seconds = seconds
        self._model, self._feeds, self._kept, self.budget, self._calibrated = model, feeds, kept, budget, calibrated
        calibration = replace(settings.calibration, statistics=None, range_file=None, figures=False)
        self.settings = replace(
            settings, calibration=calibration, prepared_file=None,
            measurement=replace(settings.measurement, enabled=False),
        )  # fmt: skip
        self._statistics: dict[str, Statistics] = {}

    @cached_property
    def _base(self) -> ir.Model:
        """The float model in the opset that every configuration needs: what converts it checks it, which takes time."""
        model = self._model.clone()
        with suppress(QuarkError):  # `prepare` says why
            convert_opset_version(model, max(opset(model), PER_CHANNEL_OPSET))
        return model

    @cached_property
    def _prepared(self) -> tuple[ir.Model, Settings]:
        model = self._base.clone()
        return model, prepare(model, self.settings)

    def without(self, names: frozenset[str], whole: bool = False) -> Tried | None:
        """Try some nodes in float; None where there is no time, or nothing to compare."""

        def change(settings: Settings) -> Settings:
            return replace(settings, specs=replace(settings.specs, exclude=(*settings.specs.exclude, names)))

        return self.tried(f"{len(names)} nodes in float", change, whole)

    def with_channel_scales(self) -> Tried | None:
        """Try a scale for each output channel of a weight; None where the target has one for all."""
        if self.settings.specs.with_layers(_with_channel_scales) == self.settings.specs:
            return None
        changed = self._prepared[1].specs.with_layers(_with_channel_scales)
        return self.tried("weights with scales of channels", lambda settings: replace(settings, specs=changed))

    def with_float_scales(self) -> Tried | None:
        """Try A8W8; None where scales are no powers of two, or the target runs no others."""
        given = self.settings.specs.layer.input
        if not self._narrow or self._has_own_types or given is None or given.scale_type is not ScaleType.pof2:
            return None
        return self.configured("A8W8")

    def with_int16(self) -> Tried | None:
        """Try A16W8; None where activations have no integers of 8 bits, or the target runs no others."""
        if not self._narrow or self._has_own_types:
            return None
        left = max(0.0, self.budget.left())
        return self.configured("A16W8", TimeBudget(self.budget.clock, self.budget.end + _MORE * left))

    @property
    def least(self) -> float:
        """The bound in dB, below which outputs are lost."""
        return LEAST if self.settings.least_sqnr is None else self.settings.least_sqnr

    @property
    def _has_own_types(self) -> bool:
        """True where the target says which types activations have."""
        target = TARGETS[self.settings.qdq.target]
        return bool(target.activations) or target.fuses is not None

    @property
    def _narrow(self) -> bool:
        """True where activations have integers of 8 bits, of known ranges."""
        specs = self.settings.specs
        given = None if specs.weights_only else specs.layer.input
        return given is not None and given.has_zero_point and not given.dynamic and given.dtype.bits <= 8

    @property
    def may_learn(self) -> bool:
        """True where AdaRound can learn how the weights round, and nothing has learned it."""
        weight, tuning = self.settings.specs.layer.weight, (AdaRoundConfig, AdaQuantConfig, GPTQConfig)
        learned = any(isinstance(one, tuning) for one in self.settings.algorithms)
        return self._narrow and weight is not None and weight.has_zero_point and not learned

    def with_bfloat16(self) -> Tried | None:
        """Try BF16; None where that is what lost the outputs."""
        if self.settings.specs.layer == _configuration("BF16").specs.layer:
            return None
        return self.configured("BF16")

    def with_default(self) -> Tried | None:
        """Try what quark makes for CPUs without samples; None where that is what lost the outputs."""
        if self.settings.specs.layer == _configuration("INT8_CPU_DYNAMIC").specs.layer:
            return None
        return self.configured("INT8_CPU_DYNAMIC")

    def configured(self, name: str, budget: TimeBudget | None = None) -> Tried | None:
        """Try a named configuration, and nothing that the refused one does to the graph.

        The inputs of the model, the nodes in float and the samples are those of the refused one. It equalizes only
        where the refused one did, and does not compare, which takes half of the time. None where there is no time, or
        it does not quantize this model.
        """
        other, calibration = _configuration(name), self.settings.calibration
        names, passes = {step.__name__ for step in (fix_shapes, convert_nchw_to_nhwc)}, self.settings.passes
        settings = replace(
            other,
            specs=replace(other.specs, exclude=self.settings.specs.exclude),
            passes={**other.passes, **{name: passes[name] for name in names & passes.keys()}},
            calibration=replace(other.calibration, samples=calibration.samples, providers=calibration.providers),
            custom_libraries=self.settings.custom_libraries,
            least_sqnr=self.settings.least_sqnr,
            equalize_if_better=False,
            equalization=None if self.settings.equalization is None else other.equalization,
        )
        trials = Trials(self._model, settings, self._feeds, budget or self.budget, self._kept, CALIBRATED_WHOLE)
        trials._base = self._base
        return trials.tried(name, lambda same: same, whole=True)

    def tried(self, what: str, change: Change, whole: bool = False) -> Tried | None:
        """Quantize by changed settings, and say what that gave; None where it cannot be, or the time is up."""
        if self.budget.left() < 0:
            return None
        try:
            with severity(2):
                model, settings = self._prepared
                settings = change(settings)
                if not whole:
                    settings = replace(
                        settings, algorithms=(), equalization=None, equalize_if_better=False, correct_biases=False
                    )
                data = Samples(self._feeds[:: -(-len(self._feeds) // self._calibrated)], model_inputs(model))
                data.clock, data.until = self.budget.clock, self.budget.end
                prepared = Prepared(model.clone(), data, fingerprint(model), statistics=self._statistics)
                quantized = convert(prepared, settings)
                finish(quantized, settings)
                proto = checked_proto(quantized)
            left = damage(self._model, proto, self._feeds, settings, self._kept, trial=True)
        except TimeUpError:
            logger.info("Tried %s: stopped, as the time for advice is up.", what)
            return None
        except QuarkError as error:
            logger.debug("Tried %s: %s", what, error)
            return None
        if left is None:
            return None
        kind = "with all that it does" if whole else "without corrections"
        logger.info("Tried %s (%s): %.1f dB; %.0f s for advice left.", what, kind, left.sqnr, self.budget.shown or 0.0)
        return Tried(proto, left, whole)


def _configuration(name: str) -> Settings:
    return lower(Config(get_default_config(name)))


def _with_channel_scales(layer: LayerSpec) -> LayerSpec:
    weight = layer.weight
    if weight is None or not weight.has_zero_point or weight.scale_type is ScaleType.pof2 or not weight.symmetric:
        return layer
    return replace(layer, weight=replace(weight, granularity=PerChannel(0)))
