"""weights_apart: how each node is computed whose weights alone have codes, or whose input is quantized as it comes.

    in integers       DynamicQuantizeMatMul, MatMulInteger, DynamicQuantizeLSTM      where that is faster than float
    weights stored    decoded once, when the file is loaded: as fast as float        else
    in float          a table of which rows are picked, decoded in each run          where the model is slower otherwise

Both models run by turns on one sample: no activation has Q/DQ, so that each node is chosen by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from quark.base.log import logger
from quark.errors import NothingToQuantizeError, SlowerThanFloatError
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.config.settings import Settings
from quark.onnx.decide import decide, write
from quark.onnx.graph.edit import is_op
from quark.onnx.placement.place import place
from quark.onnx.search.latency.kernels import ProfiledModel, Timer
from quark.onnx.search.latency.node_groups import group_nodes, side_of
from quark.onnx.search.latency.noise_sample import noise_sample
from quark.onnx.search.latency.placement_choice import GAIN
from quark.onnx.search.latency.profile_file import open_profile

SECONDS = 1.0
"""How long both models run: nodes are chosen one by one, and a wrong choice costs what cannot be told from noise."""


WITHIN_NOISE = 0.015
"""Share of the time of the float model that tables may cost: two looks at one file differ by as much."""


@dataclass(frozen=True)
class Slower:
    """What is slower than float.

    Attributes:
        stored: Names of nodes whose weights are better decoded once.
        in_float: Names of nodes that are left in float.
        candidates: How many nodes there are.
    """

    stored: frozenset[str]
    in_float: frozenset[str]
    candidates: int


def leave_slower_apart(model: ir.Model, settings: Settings, data: Samples | None, timer: Timer) -> Settings:
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
        feed, words = found
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
        f"Kernels timed on {words}: of {slower.candidates} nodes {len(slower.stored)} have their weights stored and "
        f"are computed in float, and {len(slower.in_float)} stay in float, as that is faster."
    )
    specs = settings.specs
    alone = replace(specs.layer, input=None)
    by_name = (((slower.stored,), alone), *specs.by_name) if slower.stored else specs.by_name
    exclude = (*specs.exclude, slower.in_float) if slower.in_float else specs.exclude
    return replace(settings, specs=replace(specs, by_name=by_name, exclude=exclude))


def _slower(model: ir.Model, settings: Settings, feed: Feed, timer: Timer) -> Slower:
    placed, quantized = model.clone(), model.clone()
    placement = place(placed, settings)
    names = {node.name or "" for node in placement.nodes}
    in_kernels = {node.name or "" for node in placement.dynamic}
    tables = {node.name or "" for node in placement.nodes if is_op(node, "Gather")}
    if not in_kernels | tables:
        return Slower(frozenset(), frozenset(), len(names))
    write(decide(quantized, settings, None))
    _name_last_nodes(quantized, model)
    profile = open_profile(settings.measurement)
    runs = [ProfiledModel(each, feed, settings.measurement.threads) for each in (model, quantized)]
    profile.complete(runs, timer, SECONDS, conversions=False)
    every = [node.name or "" for node in model.graph]
    sides = [
        side_of(each, run.kernels, profile.seconds(run), every)
        for each, run in zip((model, quantized), runs, strict=True)
    ]
    groups = group_nodes(model, names, sides[0], sides[1])
    before, after = (groups.seconds(side) for side in sides)

    def lost(name: str, gain: float = 0.0) -> float:
        """Seconds that the group of a node takes longer than in float, less the share that it has to save."""
        group = groups.find(name)
        return after.get(group, 0.0) - (1 - gain) * before.get(group, 0.0)

    stored = frozenset(name for name in in_kernels if lost(name, GAIN) > 0)
    kept = {groups.find(name): lost(name) for name in (in_kernels - stored) | tables}
    # A table in float takes twice the bytes: noise of a measurement is no reason.
    kept[""] = -WITHIN_NOISE * sum(before.values())
    return Slower(stored, frozenset(_tables_in_float(tables, kept, lost_by={n: lost(n) for n in tables})), len(names))


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
