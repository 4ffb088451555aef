"""How recovery's steps change settings.

A change gives other settings; or as text why it is out of the question; or None where it would change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.core.dtypes import DTYPES
from quark.core.granularity import PerTensor
from quark.core.metrics import Comparison, Metric
from quark.core.observers import OBSERVERS
from quark.core.spec import LayerSpec, ScaleType, TensorSpec
from quark.onnx.algorithms import AFTER, BEFORE, run_before
from quark.onnx.algorithms.rounding.checks import optimizer_device
from quark.onnx.algorithms.rounding.worst_layers import WorstLayers
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.qparams import onnx_range
from quark.onnx.calibration.statistics import Statistics, fingerprint
from quark.onnx.config.algo_configs import (
    AdaQuantConfig,
    AdaRoundConfig,
    AlgoConfig,
    AutoMixprecisionConfig,
    BiasCorrectionConfig,
    GPTQConfig,
)
from quark.onnx.config.settings import Settings
from quark.onnx.operators.targets import TARGETS
from quark.onnx.search.evaluator import Judge
from quark.onnx.search.noise.float_nodes import FloatNodes, Measured, known_noise, leave_in_float
from quark.onnx.search.noise.tensor_ranges import TensorRanges, choose_ranges


@dataclass(frozen=True)
class Goal:
    """What is to be reached.

    Attributes:
        metric: Of the worst output.
        target: Its value; None for as good as it gets.
        samples: On how many samples it is measured.
        output: Position of the output that is worst so far.
    """

    metric: Metric = field(default_factory=lambda: Metric("sqnr"))
    target: float | None = None
    samples: int = 1
    output: int = 0


@dataclass(frozen=True)
class Situation:
    """What a step may take into account.

    Attributes:
        plain: The settings that recovery began with.
        share: Of the layers, for which there is time.
        goal: What is to be reached.
        model: The float model, after its passes.
        identity: Its fingerprint.
        data: The samples to calibrate with.
        known: Statistics on these by the fingerprint of the model that they are of; read, and completed.
        lost: Whether the best model so far lost so much that the task suffers.
        noises: What nodes in float were chosen by before; read, and completed.
        judge: Gives what outputs are compared by, as models are; None for the outputs themselves.
        forward: Seconds of a forward of the float model.
        seconds: For what a change runs itself.
    """

    plain: Settings
    share: float = 1.0
    goal: Goal = field(default_factory=Goal)
    model: ir.Model | None = None
    identity: str = ""
    data: Samples | None = None
    known: Mapping[str, Statistics] = field(default_factory=dict)
    lost: bool = False
    noises: Measured = field(default_factory=list)
    judge: Judge | None = None
    forward: float = 0.0
    seconds: float = math.inf

    def skipped(self, forwards: int) -> str:
        """Why there is no time for forwards with noise, or ""."""
        needed = NOISY * forwards * self.forward
        return (
            "" if needed <= self.seconds else f"skipped: about {needed:.0f} s, and {max(0.0, self.seconds):.0f} s left"
        )


Change = Callable[[Settings, Situation], Settings | str | None]
"""(the best settings so far, situation) -> what the step does to them."""

TUNING = (AdaRoundConfig, AdaQuantConfig, GPTQConfig)
FEW_BITS = 4
"""Of weights: with them rounding each to its nearest code is what costs most."""
STRICTER = 0.9
"""Share of the noise that is allowed on the samples that layers are chosen with."""

NOISY = 2.0
"""What a forward takes with noise added to its tensors, in times of one without."""
FEWEST_RUNS = 24
"""Runs that tell the loudest groups of tensors from the others."""

POWER_OF_TWO = {"min_max": "pof2_non_overflow", "mse": "pof2_min_mse"}


def ranges(observer: str, percentile: float | None = None, of: tuple[str, ...] = ("input", "output")) -> Change:
    """Ranges by another statistic: of activations, from the values that were seen, or of what `of` names."""

    def change(settings: Settings, _: Situation) -> Settings | None:
        changed = _each_spec(settings, of, lambda spec: _observed(spec, observer))
        calibration = changed.calibration
        if percentile is not None and changed != settings:
            calibration = replace(calibration, percentile=percentile)
        if "input" in of:
            calibration = replace(calibration, ranges=())
        changed = replace(changed, calibration=calibration)
        return None if changed == settings else changed

    return change


def tensor_ranges(config: TensorRanges) -> Change:
    """The range of each loud activation by the statistic that serves it best."""

    def change(settings: Settings, situation: Situation) -> Settings | str | None:
        if skipped := situation.skipped(config.forwards):
            return skipped
        model, statistics = _calibrated(settings, situation)
        return choose_ranges(model, config, settings, situation.data, statistics, situation.judge)

    return change


def _calibrated(settings: Settings, situation: Situation) -> tuple[ir.Model, Statistics | None]:
    """The float model that scales are decided on, with what is known of it: as algorithms of the settings change it."""
    assert situation.model is not None
    if settings.equalization is None and not any(type(one) in BEFORE for one in settings.algorithms):
        return situation.model, situation.known.get(situation.identity)
    model = situation.model.clone()
    run_before(model, settings, situation.data)
    return model, situation.known.get(fingerprint(model))


def again(other: Change) -> Change:
    """The same once more, if algorithms were kept since that change what is seen."""

    def change(settings: Settings, situation: Situation) -> Settings | str | None:
        new = set(map(type, settings.algorithms)) - set(map(type, situation.plain.algorithms))
        return other(settings, situation) if new & (set(BEFORE) - set(AFTER)) else None

    return change


def algorithm(config: AlgoConfig) -> Change:
    """One more algorithm."""

    def change(settings: Settings, _: Situation) -> Settings | None:
        present = any(type(one) is type(config) for one in settings.algorithms)
        return None if present else replace(settings, algorithms=(*settings.algorithms, config))

    return change


def floating(config: FloatNodes, where_lost: bool = False) -> Change:
    """The nodes whose noise weighs most in float, if there is a target that nothing else reaches.

    Args:
        config: How many.
        where_lost: Only where the task suffers, without a target too.
    """

    def change(settings: Settings, situation: Situation) -> Settings | str | None:
        if where_lost and not situation.lost:
            return None
        if situation.goal.target is None and not where_lost:
            return "needs a target: it leaves no node in float that the target does not need"
        known = known_noise(settings, situation.noises) is not None
        fitting = next((one for one in _fewer_runs(config) if known or not situation.skipped(one.forwards)), None)
        if fitting is None:
            return situation.skipped(replace(config, runs=FEWEST_RUNS).forwards)
        model, statistics = _calibrated(settings, situation)
        return leave_in_float(model, fitting, settings, situation.data, statistics, situation.noises, situation.judge)

    return change


def _fewer_runs(config: FloatNodes) -> Iterator[FloatNodes]:
    """The config, and with fewer runs, which leave more tensors in groups."""
    yield from (replace(config, runs=runs) for runs in range(config.runs, FEWEST_RUNS - 1, -8))


def with_plain_ranges(other: Change) -> Change:
    """The same with the ranges of the plain config: what it does may make those that came since needless."""

    def change(settings: Settings, situation: Situation) -> Settings | str | None:
        plain = situation.plain.specs
        before = replace(
            settings,
            specs=replace(settings.specs, layer=plain.layer, by_name=plain.by_name, by_type=plain.by_type),
            calibration=replace(
                settings.calibration,
                percentile=situation.plain.calibration.percentile,
                ranges=situation.plain.calibration.ranges,
            ),
        )
        return None if before == settings else other(before, situation)

    return change


def solve_few_bits(settings: Settings, _: Situation) -> Settings | None:
    """GPTQ, where weights have few bits."""
    weight = settings.specs.layer.weight
    tuned = any(isinstance(one, TUNING) for one in settings.algorithms)
    if weight is None or not weight.has_zero_point or weight.dtype.bits > FEW_BITS or tuned:
        return None
    # Biases make up for what is left.
    last = [one for one in settings.algorithms if isinstance(one, BiasCorrectionConfig)]
    others = [one for one in settings.algorithms if one not in last]
    return replace(settings, algorithms=(*others, GPTQConfig(), *last))


def tuning(config: AdaRoundConfig | AdaQuantConfig) -> Change:
    """Rounding or weights are learned, instead of what else learns them; if there is no time for all layers, those of
    the worst ones.
    """

    def change(settings: Settings, situation: Situation) -> Settings | str | None:
        # Imports torch, whose seconds say nothing about those of training.
        optimizer_device(config)
        all_layers = situation.share >= 1
        replaced = (*TUNING, WorstLayers) if all_layers else (WorstLayers,)
        others = [one for one in settings.algorithms if not isinstance(one, replaced)]
        tuned = config if all_layers else WorstLayers(config, AFTER[type(config)], situation.share)
        # What biases make up for is known once weights are what they will be.
        last = [one for one in others if isinstance(one, BiasCorrectionConfig)]
        changed = replace(settings, algorithms=(*(one for one in others if one not in last), tuned, *last))
        return None if changed == settings else changed

    return change


def raise_all_bits(settings: Settings, situation: Situation) -> Settings | str | None:
    """Twice the bits for all layers, if there is a target that nothing else reaches."""
    if situation.goal.target is None:
        return None
    raised = _each_spec(settings, ("weight", "input", "output"), _twice)
    wide = raised.specs.layer.weight is not None and raised.specs.layer.weight.dtype.bits > 8
    # Rounding to 16 bits leaves nothing to learn.
    needless = (AutoMixprecisionConfig, *((*TUNING, WorstLayers) if wide else ()))
    kept = (one for one in settings.algorithms if not isinstance(one, needless))
    if raised.specs.layer == settings.specs.layer:
        return None
    if TARGETS[settings.qdq.target].activations:
        return f"the target {settings.qdq.target} has 8 bits only"
    if settings.specs.layer.input is not None and settings.specs.layer.input.dynamic:
        return "dynamic quantization has 8 bits only"
    return replace(raised, specs=replace(raised.specs, mixed=()), algorithms=tuple(kept))


def raise_bits(settings: Settings, situation: Situation) -> Settings | str | None:
    """Twice the bits for the layers that gain most by it, until the target is reached."""
    goal = situation.goal
    if goal.target is None:
        return "needs a target: it raises no more bits than that takes"
    raised = raise_all_bits(settings, situation)
    if not isinstance(raised, Settings):
        return raised
    if any(isinstance(one, AutoMixprecisionConfig) for one in settings.algorithms):
        return None

    def distance(before: list[list[NumpyArray]], after: list[list[NumpyArray]]) -> float:
        comparison = Comparison()
        for (x,), (y,) in zip(before, after, strict=True):
            comparison.update(x, y)
        return goal.metric.noise(goal.metric.of(comparison), len(before))

    config = AutoMixprecisionConfig(
        target_layer_config=[],
        metric_output_index=goal.output,
        metric_distance_fn=distance,
        metric_threshold=STRICTER * goal.metric.noise(goal.target, goal.samples),
        metric_optimize_object="quality",
    )
    return replace(
        settings,
        specs=replace(settings.specs, mixed=((raised.specs.layer, None),)),
        algorithms=(*settings.algorithms, config),
    )


def _twice(spec: TensorSpec) -> TensorSpec:
    """The spec with 8 bits for 4, or 16 for 8; with 16, cutting off the largest values gains nothing."""
    if spec.dtype.bits > 8:
        return spec
    name = f"{spec.dtype.name.rstrip('0123456789')}{2 * spec.dtype.bits}"
    wider = onnx_range(replace(spec, dtype=DTYPES[name]))
    assert wider is not None
    return _observed(wider, "min_max") if wider.dtype.bits > 8 else wider


def _each_spec(settings: Settings, fields: tuple[str, ...], change: Callable[[TensorSpec], TensorSpec]) -> Settings:
    """Settings with these specs of every layer changed; those that need no range stay."""

    def changed(layer: LayerSpec) -> LayerSpec:
        specs = {name: getattr(layer, name) for name in fields}
        return replace(
            layer,
            **{name: change(s) for name, s in specs.items() if s and s.has_zero_point and not s.dynamic},
        )

    return replace(settings, specs=settings.specs.with_layers(changed))


def _observed(spec: TensorSpec, observer: str) -> TensorSpec:
    """The spec with another statistic, where that has a form for its scales."""
    if spec.scale_type is ScaleType.pof2:
        observer = POWER_OF_TWO.get(observer, spec.observer)
    fits = isinstance(spec.split, PerTensor) or not OBSERVERS[observer].per_tensor_only
    return replace(spec, observer=observer) if fits else spec
