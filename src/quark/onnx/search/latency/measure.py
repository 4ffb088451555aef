"""measure: leave in float what a machine computes faster so.

The float model, and the one that the target's rule would make of it, run by turns on one sample. A minimum cut over the
times of their kernels says which nodes of the second are kept (`choose_nodes.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from quark.base.log import logger
from quark.base.memory_and_disk import give_back_memory
from quark.errors import CalibrationError, ConfigError, SlowerThanFloatError
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.config.settings import Settings
from quark.onnx.decide import decide, write
from quark.onnx.operators.targets import TARGETS
from quark.onnx.placement.place import place
from quark.onnx.search.latency.choose_nodes import choose_nodes
from quark.onnx.search.latency.kernels import ProfiledModel, Timer, timed
from quark.onnx.search.latency.node_groups import side_of
from quark.onnx.search.latency.placement_choice import placement_choice
from quark.onnx.search.latency.profile_file import open_profile
from quark.onnx.search.latency.weights_apart import leave_slower_apart

LEAST_GAIN = 0.01
"""Share of the time of the float kernels: less is within what two measurements of one kernel differ by, and integers
cost accuracy, and the size of all that then stays in float."""


@dataclass(frozen=True)
class Measured:
    """What was found.

    Attributes:
        stay_float: Names of the nodes that are faster in float.
        in_integers: How many nodes are kept.
        float_seconds: Kernels of the float model.
        chosen_seconds: The same of the model with the nodes that are kept.
        all_seconds: The same where the target's rule alone decides.
    """

    stay_float: frozenset[str]
    in_integers: int
    float_seconds: float
    chosen_seconds: float
    all_seconds: float


def leave_slower_in_float(model: ir.Model, settings: Settings, data: Samples | None, timer: Timer = timed) -> Settings:
    """The settings, with the nodes excluded that are faster in float.

    Args:
        model: The float model, prepared; not changed.
        settings: With a target whose kernels are known.
        data: Calibration samples; the first is what the models run on. Needed for static integers.
        timer: Instead of the clock.

    Raises:
        ConfigError: The settings leave nothing to measure; or the profile is of another machine, and lacks kernels.
        CalibrationError: There is no sample.
        SlowerThanFloatError: No choice is faster than float.
    """
    if settings.specs.weights_apart:
        _check(settings)
        return leave_slower_apart(model, settings, data, timer)
    found = measure(model, settings, data, timer)
    times = f"float {found.float_seconds * 1e3:.3f} ms, by the target's rule {found.all_seconds * 1e3:.3f} ms"
    if not found.in_integers:
        raise SlowerThanFloatError(
            f"No choice of integer kernels is faster than float on this processor ({times}). Possible: the float model "
            "as it is, or MeasurePlacement=False (--no-measure) for a smaller file."
        )
    logger.info(
        f"Measured placement: {found.in_integers} of {found.in_integers + len(found.stay_float)} nodes in integers; "
        f"kernels take {found.chosen_seconds * 1e3:.3f} ms ({times})."
    )
    return _without(settings, found.stay_float)


def measure(model: ir.Model, settings: Settings, data: Samples | None, timer: Timer = timed) -> Measured:
    """Find which nodes are faster in integers; the arguments and errors are those of `leave_slower_in_float`.

    The cut knows each kernel in two surroundings only. What it chooses is made and looked up kernel by kernel too, and
    the fastest of it, all in integers and all in float is the result: float where the others gain next to nothing.
    """
    _check(settings)
    if data is None or not len(data):
        raise CalibrationError(
            "MeasurePlacement runs the model on a calibration sample, and there is none. Possible: a calibration data "
            "reader (--calib), or MeasurePlacement=False."
        )
    placed = model.clone()
    placement = place(placed, settings)
    nodes = [node.name or "" for node in model.graph]
    quantized = _quantized(model, settings, data)
    profile = open_profile(settings.measurement)
    runs = [ProfiledModel(each, data[0], settings.measurement.threads) for each in (model, quantized)]
    profile.complete(runs, timer)
    sides = [
        side_of(each, run.kernels, profile.seconds(run), nodes)
        for each, run in zip((model, quantized), runs, strict=True)
    ]
    found = placement_choice(placed, placement, settings, sides[0], sides[1], profile.conversions)
    chosen = choose_nodes(found.choice)
    stay = frozenset(name for name in found.candidates if found.groups.find(name) not in chosen)
    totals = {found.candidates: sides[0].total(), frozenset[str](): sides[1].total()}
    if stay not in totals:
        give_back_memory()
        run = ProfiledModel(_quantized(model, _without(settings, stay), data), data[0], settings.measurement.threads)
        profile.complete([run], timer)
        totals[stay] = sum(profile.seconds(run).values())
    best = min(totals, key=lambda names: totals[names])
    if totals[best] > (1 - LEAST_GAIN) * totals[found.candidates]:
        best = found.candidates
    return Measured(best, len(found.candidates - best), sides[0].total(), totals[best], sides[1].total())


def _quantized(model: ir.Model, settings: Settings, data: Samples) -> ir.Model:
    """The model with Q/DQ, of scales from one sample: their form has an effect on time, and their values have none."""
    calibration = replace(settings.calibration, samples=1, statistics=None, range_file=None, figures=False)
    quantized = model.clone()
    write(decide(quantized, replace(settings, calibration=calibration), data))
    return quantized


def _without(settings: Settings, names: frozenset[str]) -> Settings:
    """The settings with some nodes excluded."""
    specs = settings.specs
    return replace(settings, specs=replace(specs, exclude=(*specs.exclude, names))) if names else settings


def _check(settings: Settings) -> None:
    """Raise ConfigError where nothing can be measured."""
    if TARGETS[settings.qdq.target].fuses is None:
        known = ", ".join(name for name, target in TARGETS.items() if target.fuses is not None)
        raise ConfigError(
            f"MeasurePlacement times the kernels of this processor, and the target is {settings.qdq.target!r}. "
            f"Possible: {known}."
        )
    if settings.crypto:
        raise ConfigError("MeasurePlacement writes a profile to the disk, and CryptoMode writes nothing there.")
