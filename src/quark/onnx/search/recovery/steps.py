"""The steps of recovery: how each changes settings (`search/change.py`), and their order.

A new step is a row of STEPS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quark.core.array import NumpyArray
from quark.core.dtypes import DTYPES
from quark.core.granularity import PerTensor
from quark.core.metrics import Comparison
from quark.core.observers import OBSERVERS
from quark.core.spec import LayerSpec, ScaleType, TensorSpec
from quark.onnx.algorithms import AFTER, BEFORE, run_before
from quark.onnx.algorithms.rounding.checks import optimizer_device
from quark.onnx.algorithms.rounding.worst_layers import WorstLayers
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.calibration.qparams import onnx_range
from quark.onnx.calibration.statistics import fingerprint
from quark.onnx.config.algo_configs import (
    AdaQuantConfig,
    AdaRoundConfig,
    AlgoConfig,
    AutoMixprecisionConfig,
    BiasCorrectionConfig,
    CLEConfig,
    GPTQConfig,
    QuarotConfig,
    SmoothQuantConfig,
)
from quark.onnx.config.settings import Settings
from quark.onnx.operators.targets import TARGETS
from quark.onnx.search.change import Change, Situation
from quark.onnx.search.noise.choices import FloatNodes, TensorRanges, choose_ranges, known_noise, leave_in_float
from quark.onnx.search.noise.priced import leave_in_float_at

TUNING = (AdaRoundConfig, AdaQuantConfig, GPTQConfig)
_FEW_BITS = 4
"""Of weights: with them rounding each to its nearest code is what costs most."""
_STRICTER = 0.9
"""Share of the noise that is allowed on the samples that layers are chosen with."""

_FEWEST_RUNS = 24
"""Runs that tell the noisiest groups of tensors from the others."""

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
    """The range of each noisy activation by the statistic that serves it best."""

    def change(settings: Settings, situation: Situation) -> Settings | str | None:
        if skipped := situation.skipped(config.forwards):
            return skipped
        prepared = _calibrated(settings, situation)
        return choose_ranges(prepared, config, settings, situation.measure)

    return change


def _calibrated(settings: Settings, situation: Situation) -> Prepared:
    """The float model that scales are decided on: as algorithms of the settings change it."""
    prepared = situation.prepared
    assert prepared is not None
    if settings.equalization is None and not any(type(one) in BEFORE for one in settings.algorithms):
        return prepared
    prepared = prepared.copy()
    run_before(prepared.model, settings, prepared.data)
    return replace(prepared, identity=fingerprint(prepared.model))


def again(other: Change) -> Change:
    """A change that is made once more, if algorithms were kept since that change the ranges."""

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
            return "needs a target (--reach): nodes in float cost time, so only as many are as the target takes"
        fitting = _fitting(config, settings, situation)
        if isinstance(fitting, str):
            return fitting
        prepared = _calibrated(settings, situation)
        return leave_in_float(prepared, fitting, settings, situation.noises, situation.measure)

    return change


def worth_their_time(price: float) -> Change:
    """The nodes in float that gain a price, in dB for each 1 % of the time of the float model, where the task suffers.

    The kernels have to be timed.
    """

    def change(settings: Settings, situation: Situation) -> Settings | str | None:
        if not situation.lost or situation.kernels is None:
            return None
        fitting = _fitting(FloatNodes(), settings, situation)
        if isinstance(fitting, str):
            return fitting
        prepared = _calibrated(settings, situation)
        return leave_in_float_at(
            price, situation.kernels, prepared, fitting, settings, situation.noises, situation.measure
        )

    return change


def _fitting(config: FloatNodes, settings: Settings, situation: Situation) -> FloatNodes | str:
    """The config with as many runs as there is time for, or why there is none. Fewer leave more tensors in groups."""
    known = known_noise(settings, situation.noises) is not None
    configs = (replace(config, runs=runs) for runs in range(config.runs, _FEWEST_RUNS - 1, -8))
    fitting = next((one for one in configs if known or not situation.skipped(one.forwards)), None)
    return fitting or situation.skipped(replace(config, runs=_FEWEST_RUNS).forwards)


def with_plain_ranges(other: Change) -> Change:
    """A change on top of the ranges of the plain config: it may make those that came since needless."""

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
    if weight is None or not weight.has_zero_point or weight.dtype.bits > _FEW_BITS or tuned:
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
        return "needs a target (--reach): more bits cost size and time, so only as many are given as the target takes"
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
        metric_threshold=_STRICTER * goal.metric.noise(goal.target, goal.samples),
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
            layer, **{name: change(s) for name, s in specs.items() if s and s.has_zero_point and not s.dynamic}
        )

    return replace(settings, specs=settings.specs.with_layers(changed))


def _observed(spec: TensorSpec, observer: str) -> TensorSpec:
    """The spec with another statistic, where that has a form for its scales."""
    if spec.scale_type is ScaleType.pof2:
        observer = POWER_OF_TWO.get(observer, spec.observer)
    fits = isinstance(spec.split, PerTensor) or not OBSERVERS[observer].per_tensor_only
    return replace(spec, observer=observer) if fits else spec


# The steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One thing to try.

    Attributes:
        name: What the table calls it.
        change: What it does to the settings.
        like: Name of the step before that tells what this one costs; "" for none.
        factor: How many times the work of that one.
        last_resort: Whether time is kept for it, where there is a target.
        wider: Whether it gives a model of more bits than the config asks for.
        follows: Name of a step before, without whose gain there is no hope in this one; "" for none. Where there is a
            target, all is tried.
        least: That gain, in dB of noise; below 0 what it may have lost.
        price: dB that it has to gain for each 1 % of the time of the float model that its file takes longer; 0 for
            none.
    """

    name: str
    change: Change
    like: str = ""
    factor: float = 1
    last_resort: bool = False
    wider: bool = False
    follows: str = ""
    least: float = 0.0
    price: float = 0.0


RANGES = {
    "MinMax": ranges("min_max"),
    "MinMSE": ranges("mse"),
    "Percentile 99.99": ranges("percentile", 99.99),
    "Entropy": ranges("entropy"),
}
# Not through gates, which costs a Mul for each: presets that gain by it compare that before.
EQUALIZE = algorithm(CLEConfig(cle_scale_use_threshold=False, cle_steps=4, cle_through_gates=False))
SMOOTH = algorithm(SmoothQuantConfig())
OFTEN = 10
"""Iterations after which training looks at the clock."""
SHORT = "AdaQuant, 30 iterations"
ADAROUND, ADAQUANT = "AdaRound, 100 iterations", "AdaQuant, 300 iterations"
LONGER, LONGEST = "AdaRound, 1000 iterations", "AdaQuant, 3000 iterations"
_FAR_ENOUGH = 0.02
"""Rate of a short learning, in scales of a weight: 30 falling steps move it by a third of a code at most.

ResNet-18, held-out samples, at .01, .03 and .06: 8 bits 27.40, 27.22, 27.11 dB; 4 bits 17.24, 17.95, 17.36."""
ENOUGH = 0.1
"""dB that learning has to gain before it is worth ten times as long."""
FAR = 1.0
"""dB that ranges may be below the best, and yet be better with what an algorithm makes of the model."""
STEPS = (
    *(Step(f"ranges: {name}", change) for name, change in RANGES.items()),
    Step("weight ranges: MinMSE", ranges("mse", of=("weight",))),
    Step("CLE", EQUALIZE),
    Step("CLE, ranges of the config", with_plain_ranges(EQUALIZE)),
    Step("SmoothQuant", SMOOTH),
    Step("SmoothQuant, ranges of the config", with_plain_ranges(SMOOTH)),
    Step("QuaRot", algorithm(QuarotConfig())),
    *(
        Step(f"ranges again: {name}", again(change), follows=f"ranges: {name}", least=-FAR)
        for name, change in RANGES.items()
    ),
    Step("ranges of each tensor", tensor_ranges(TensorRanges())),
    # It runs both models layer by layer, and so does each step after it that keeps it.
    Step("BiasCorrection", algorithm(BiasCorrectionConfig())),
    # Seconds, where learning takes minutes.
    Step("GPTQ, of weights of few bits", solve_few_bits),
    Step("the worst nodes in float", floating(FloatNodes())),
    Step(SHORT, tuning(AdaQuantConfig(num_iterations=30, relative_rate=_FAR_ENOUGH, log_period=OFTEN))),
    Step(ADAROUND, tuning(AdaRoundConfig(num_iterations=100, log_period=OFTEN)), SHORT, 4),
    Step(ADAQUANT, tuning(AdaQuantConfig(num_iterations=300, log_period=OFTEN)), ADAROUND, 3),
    Step(LONGER, tuning(AdaRoundConfig(log_period=OFTEN)), ADAROUND, 10, follows=ADAQUANT, least=ENOUGH),
    Step(LONGEST, tuning(AdaQuantConfig(log_period=OFTEN)), ADAQUANT, 10, follows=LONGER, least=ENOUGH),
    Step("more bits for the most sensitive layers", raise_bits, wider=True),
    Step("more bits for all layers", raise_all_bits, last_resort=True, wider=True),
)
_FEW_IN_FLOAT = tuple(
    Step(f"{share:.0%} of the nodes in float", floating(FloatNodes(share), where_lost=True))
    for share in (0.05, 0.1, 0.2)
)
PRICE = 0.5
"""dB for each 1 % of the time of the float model: what nodes in float have to gain, as it is measured.

The files of six trained models gain 0.8 to 7 by nodes that are worth it, and 0.1 to 0.2 by the others."""
PRICES = (4.0, 2.0, 1.0, PRICE)
"""dB for each 1 % that a step estimates its nodes in float to gain, the largest first."""
_WORTH_THEIR_TIME = tuple(
    Step(f"nodes in float: {price:g} dB for 1% of the time", worth_their_time(price), price=PRICE) for price in PRICES
)
QUICK_STEPS = (
    *(Step(f"ranges: {name}", change) for name, change in RANGES.items() if name != "Entropy"),
    *_WORTH_THEIR_TIME,
    *_FEW_IN_FLOAT,
    Step("ranges of each tensor", tensor_ranges(TensorRanges())),
    Step("BiasCorrection", algorithm(BiasCorrectionConfig())),
)
"""Those that gain most for their seconds, for a configuration that nobody chose."""
WEIGHTS_STEPS = (Step("BiasCorrection", algorithm(BiasCorrectionConfig())), *_FEW_IN_FLOAT)
"""The steps for models of which weights alone are quantized."""
