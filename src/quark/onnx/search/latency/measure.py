"""measure: leave in float what a machine computes faster so.

The float model, and the one that the target's rule would make of it, run by turns on one sample.

Static integers    a minimum cut over the times of their kernels says which nodes of the second are kept
                   (`choose_nodes.py`): a tensor between two of them has Q/DQ or has none
Weights alone, or inputs quantized as they come    no activation has Q/DQ, so that each node is chosen by itself:
    in integers       DynamicQuantizeMatMul, MatMulInteger, DynamicQuantizeLSTM      where that is faster than float
    weights stored    decoded once, when the file is loaded: as fast as float        else
    in float          a table of which rows are picked, decoded in each run          where the model is slower otherwise
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from quark.base.log import logger
from quark.base.memory_and_disk import give_back_memory
from quark.core.dtypes import DTYPES
from quark.core.spec import LayerSpec
from quark.errors import CalibrationError, ConfigError, NothingToQuantizeError, SlowerThanFloatError
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.settings import Settings
from quark.onnx.decide import decide, write
from quark.onnx.graph.edit import is_op
from quark.onnx.graph.sessions import integer_kernels_are_exact
from quark.onnx.operators.targets import TARGETS
from quark.onnx.placement.place import place
from quark.onnx.search.latency.choose_nodes import GAIN, PlacementChoice, choose_nodes, placement_choice
from quark.onnx.search.latency.kernels import ProfiledModel, Timer, timed
from quark.onnx.search.latency.node_groups import Side, group_nodes, side_of
from quark.onnx.search.latency.noise_sample import noise_sample
from quark.onnx.search.latency.profile_file import SECONDS, Profile, open_profile

_LEAST_GAIN = 0.01
"""Share of the time of the float kernels: less is within what two measurements of one kernel differ by, and integers
cost accuracy, and the size of all that then stays in float."""


@dataclass(frozen=True)
class Measured:
    """The nodes that are left in float, and the times by which they were found.

    Attributes:
        stay_float: Names of the nodes that are faster in float.
        in_integers: How many nodes are kept.
        float_seconds: Kernels of the float model.
        chosen_seconds: The same of the model with the nodes that are kept.
        all_seconds: The same where the target's rule alone decides.
        node_seconds: (node, seconds in float): of the nodes of one kernel each an equal share.
        placement: What there was to choose from.
    """

    stay_float: frozenset[str]
    in_integers: int
    float_seconds: float
    chosen_seconds: float
    all_seconds: float
    node_seconds: tuple[tuple[str, float], ...]
    placement: PlacementChoice


def leave_slower_in_float(prepared: Prepared, settings: Settings, timer: Timer = timed) -> Settings:
    """Settings that exclude the nodes that are faster in float, and leave nothing to be measured; see below."""
    return measured_placement(prepared, settings, timer)[0]


def measured_placement(
    prepared: Prepared, settings: Settings, timer: Timer = timed
) -> tuple[Settings, PlacementChoice | None]:
    """Settings that exclude the nodes that are faster in float, and what there was to choose from.

    The settings leave nothing to be measured. There is no choice of kernels for weights alone, and for inputs that are
    quantized as they come.

    Args:
        prepared: The float model, and its samples: the models run on the first. Needed for static integers.
        settings: With a target whose kernels are known.
        timer: Instead of the clock.

    Raises:
        ConfigError: The settings leave nothing to measure; or the profile is of another machine, and lacks kernels.
        CalibrationError: There is no sample.
        SlowerThanFloatError: No choice is faster than float.
    """
    model, data = prepared.model, prepared.data
    settings = replace(settings, measurement=replace(settings.measurement, enabled=False))
    if settings.specs.weights_apart:
        _check(settings)
        return _leave_slower_apart(model, settings, data, timer), None
    if settings.measurement.profile is None:
        settings = _with_exact_sums(settings)
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
    settings = replace(settings, measurement=replace(settings.measurement, node_seconds=found.node_seconds))
    return _without(settings, found.stay_float), found.placement


def _with_exact_sums(settings: Settings) -> Settings:
    """The settings with uint8 weights for int8 ones, of the values that these have, where this processor needs them.

    Its kernels are exact for uint8 inputs and weights; for int8 weights they are so with VNNI only.
    """
    if integer_kernels_are_exact():
        return settings

    def in_uint8(layer: LayerSpec) -> LayerSpec:
        weight, data = layer.weight, layer.input
        if weight is None or data is None or (str(weight.dtype), data.dtype.bits) != ("int8", 8):
            return layer
        return replace(layer, weight=replace(weight, dtype=DTYPES["uint8"]))

    specs = settings.specs.with_layers(in_uint8)
    if specs != settings.specs:
        logger.info("Weights are uint8, not int8: this processor has no VNNI, and sums with int8 weights saturate.")
    return replace(settings, specs=specs)


def measure(model: ir.Model, settings: Settings, data: Samples | None, timer: Timer = timed) -> Measured:
    """Find which nodes of a model are faster in integers; the rest and the errors are as of `leave_slower_in_float`.

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
    sides, profile = _timed_sides((model, _quantized_once(model, settings, data)), data[0], settings, timer)
    found = placement_choice(placed, placement, settings, sides[0], sides[1], profile.conversions)
    chosen = choose_nodes(found.choice)
    stay = frozenset(name for name in found.candidates if found.groups.find(name) not in chosen)
    totals = {found.candidates: sides[0].total(), frozenset[str](): sides[1].total()}
    if stay not in totals:
        give_back_memory()
        run = ProfiledModel(
            _quantized_once(model, _without(settings, stay), data), data[0], settings.measurement.threads
        )
        profile.complete([run], timer)
        totals[stay] = sum(profile.seconds(run).values())
    best = min(totals, key=lambda names: totals[names])
    if totals[best] > (1 - _LEAST_GAIN) * totals[found.candidates]:
        best = found.candidates
    return Measured(
        best, len(found.candidates - best), sides[0].total(), totals[best], sides[1].total(), sides[0].of_nodes(), found
    )


def _timed_sides(
    models: Sequence[ir.Model],
    feed: Feed,
    settings: Settings,
    timer: Timer,
    seconds: float = SECONDS,
    conversions: bool = True,
) -> tuple[list[Side], Profile]:
    """How the float model, the first, and others run on a sample, and the profile that has the times."""
    profile, nodes = open_profile(settings.measurement), [node.name or "" for node in models[0].graph]
    runs = [ProfiledModel(each, feed, settings.measurement.threads) for each in models]
    profile.complete(runs, timer, seconds, conversions)
    sides = [side_of(each, run.kernels, profile.seconds(run), nodes) for each, run in zip(models, runs, strict=True)]
    return sides, profile


def _quantized_once(model: ir.Model, settings: Settings, data: Samples) -> ir.Model:
    """The model with Q/DQ, of scales from one sample: their form has an effect on time, and their values have none."""
    calibration = replace(settings.calibration, samples=1, statistics=None, range_file=None, figures=False)
    quantized = model.clone()
    write(decide(Prepared(quantized, data), replace(settings, calibration=calibration)))
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


# Weights alone, or inputs that are quantized as they come ------------------------------------------------------------


_SECONDS_APART = 1.0
"""How long both models run: nodes are chosen one by one, and a wrong choice costs what cannot be told from noise."""
_WITHIN_NOISE = 0.015
"""Share of the time of the float model that tables may cost: two looks at one file differ by as much."""


@dataclass(frozen=True)
class _Slower:
    """The nodes that are slower than in float.

    Attributes:
        stored: Names of nodes whose weights are better decoded once.
        in_float: Names of nodes that are left in float.
        candidates: How many nodes there are.
    """

    stored: frozenset[str]
    in_float: frozenset[str]
    candidates: int


def _leave_slower_apart(model: ir.Model, settings: Settings, data: Samples | None, timer: Timer) -> Settings:
    """The settings, with each node computed as is fastest; as they are where the model cannot be run.

    Args:
        model: The float model, prepared; not changed.
        settings: Of weights alone, or of inputs that are quantized as they come.
        data: Samples, of which the first is run; None for noise.
        timer: Instead of the clock.

    Raises:
        ConfigError: The profile is of another machine, and lacks kernels.
        SlowerThanFloatError: Nothing but float is as fast.
    """
    if data is None and settings.specs.is_body:
        return settings  # what it reads is known when the model runs
    if data is not None and len(data):
        feed, words = data[0], "the first sample"
    elif (found := noise_sample(model)) is not None:
        feed, words = found.feed, found.words
    else:
        logger.info("Kernels are not timed: there are no samples, and the model does not run on noise.")
        return settings
    try:
        slower = _slower(model, settings, feed, timer)
    except NothingToQuantizeError:
        return settings  # beside what is in bodies, which are not timed
    if len(slower.in_float) == slower.candidates:
        raise SlowerThanFloatError(
            f"No integers are as fast as float on this processor (on {words}). Possible: the float model as it is, or "
            "MeasurePlacement=False (--no-measure) for a smaller file."
        )
    if not slower.stored | slower.in_float:
        return settings
    logger.info(
        f"Each node was timed on this processor, in float and in integers (on {words}). Of {slower.candidates} nodes "
        f"with weights {slower.candidates - len(slower.stored) - len(slower.in_float)} are faster in integers, or as "
        f"fast. {len(slower.stored)} are faster in float: their weights are int8 in the file, for its size, and are "
        f"decoded when it is loaded. {len(slower.in_float)} stay float in the file."
    )
    specs = settings.specs
    alone = replace(specs.layer, input=None)
    by_name = (((slower.stored,), alone), *specs.by_name) if slower.stored else specs.by_name
    exclude = (*specs.exclude, slower.in_float) if slower.in_float else specs.exclude
    return replace(settings, specs=replace(specs, by_name=by_name, exclude=exclude))


def _slower(model: ir.Model, settings: Settings, feed: Feed, timer: Timer) -> _Slower:
    placed, quantized = model.clone(), model.clone()
    placement = place(placed, settings)
    names, in_kernels, tables = (
        {node.name or "" for node in nodes}
        for nodes in (placement.nodes, placement.dynamic, [node for node in placement.nodes if is_op(node, "Gather")])
    )
    if not in_kernels | tables:
        return _Slower(frozenset(), frozenset(), len(names))
    write(decide(Prepared(quantized), settings))
    _name_last_nodes(quantized, model)
    sides, _ = _timed_sides((model, quantized), feed, settings, timer, _SECONDS_APART, conversions=False)
    groups = group_nodes(model, names, sides[0], sides[1])
    before, after = (groups.seconds(side) for side in sides)

    def lost(name: str, gain: float = 0.0) -> float:
        """Seconds that the group of a node takes longer than in float, less the share that it has to save."""
        group = groups.find(name)
        return after.get(group, 0.0) - (1 - gain) * before.get(group, 0.0)

    stored = frozenset(name for name in in_kernels if lost(name, GAIN) > 0)
    kept = {groups.find(name): lost(name) for name in (in_kernels - stored) | tables}
    # A table in float takes twice the bytes: noise of a measurement is no reason.
    kept[""] = -_WITHIN_NOISE * sum(before.values())
    return _Slower(stored, frozenset(_tables_in_float(tables, kept, lost_by={n: lost(n) for n in tables})), len(names))


def _name_last_nodes(quantized: ir.Model, model: ir.Model) -> None:
    """Give the node that writes what a float node wrote the name of that one: it stands for the nodes before it."""
    writers = {value.name: node.name for node in model.graph for value in node.outputs}
    for node in quantized.graph:
        names = {writers[value.name] for value in node.outputs if value.name in writers}
        if len(names) == 1:
            node.name = names.pop()


def _tables_in_float(tables: set[str], kept: Mapping[str, float], lost_by: Mapping[str, float]) -> set[str]:
    """The tables that are left in float: those that lose most, until the model loses nothing."""
    balance, found = sum(kept.values()), set[str]()
    for name in sorted(tables, key=lambda name: (-lost_by[name], name)):
        if balance <= 0 or lost_by[name] <= 0:
            break
        found.add(name)
        balance -= lost_by[name]
    return found
