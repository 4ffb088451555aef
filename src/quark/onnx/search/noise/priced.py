"""priced: which nodes go back to float, where each dB that this gains has a price in time.

With S the groups of nodes in integers, T(S) the time of all kernels and conversions (`latency/choose_nodes.py`), N(S)
the power of the noise of all tensors that are quantized then (`sensitivity.py`), and a price of P dB for each 1 % of
the time of the float model:

    minimise  T(S) + c ln(N(S) + E)        c = T(float) / 100 * 10 / (P ln 10)        E: a noise that is seldom felt

A tensor is quantized as long as one of its holders is: it is a group of its own, which these need, and which costs its
share of the noise. With M = N + E, ln M <= ln M_0 + (M - M_0) / M_0, with equality at M_0. So the minimum cut with a
cost of c / M_0 for each unit of noise lowers the sum. It is cut again until it stays (majorize-minimize: Hunter and
Lange 2004).
So nodes whose noise is cheap to avoid come first, and those beside each other together, as that saves conversions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from quark.base.log import logger
from quark.errors import NothingQualifiesError
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.settings import Settings
from quark.onnx.placement.place import place
from quark.onnx.search.evaluator import SCORES_LOST, SPARE, PartValues
from quark.onnx.search.latency.choose_nodes import KernelChoice, PlacementChoice, choose_nodes
from quark.onnx.search.noise.choices import FloatNodes, Measured, noise_under
from quark.onnx.search.noise.sensitivity import OutputNoise

_MOST_CUTS = 8
"""Most of them were at rest after four."""
ENOUGH = 10 ** (-(SCORES_LOST + SPARE) / 10)
"""Power of the noise, of that of the outputs, that is seldom felt: less of it is worth no time."""
_MOST = 1.0
"""Power that the noise of a tensor counts as at most, that of the outputs: more, or infinity, would hide all others."""


def leave_in_float_at(
    price: float,
    found: PlacementChoice,
    prepared: Prepared,
    config: FloatNodes,
    settings: Settings,
    measured: Measured,
    measure: PartValues | None = None,
) -> Settings:
    """Settings that exclude the nodes which are worth their time.

    Args:
        price: dB that 1 % of the time of the float model has to gain.
        found: The kernels to choose from.
        prepared: The float model and its samples; not changed.
        config: Says in how many runs the noise is measured.
        settings: Of the other nodes.
        measured: Noises of the model on these samples; read, and completed.
        measure: Gives the values by which a part of an output is compared; None for the part itself.

    Raises:
        NothingQualifiesError: No node is worth it.
    """
    noise, _ = noise_under(prepared, config, settings, measured, measure)
    quantized = {node.name or "" for node in place(prepared.model.clone(), settings).nodes}
    nodes = sorted(quantized - nodes_at(price, found, noise, quantized))
    if not nodes:
        raise NothingQualifiesError("no node in float gains as much for its time")
    logger.info("In float, for the noise that they put into the outputs: %s.", ", ".join(nodes))
    return replace(settings, specs=replace(settings.specs, exclude=(*settings.specs.exclude, *nodes)))


def nodes_at(price: float, found: PlacementChoice, noise: OutputNoise, quantized: Collection[str]) -> set[str]:
    """The nodes that stay in integers at a price.

    Args:
        price: As above.
        found: The kernels to choose from.
        noise: Of each tensor.
        quantized: The nodes that are in integers so far; no others will be.
    """
    groups = found.groups
    members = {groups.find(name) for name in quantized}
    powers = {index: min(power, _MOST) for index, power in enumerate(noise.powers.values())}
    holders = {
        index: {groups.find(name) for name in source.holders.intersection(quantized)}
        for index, source in enumerate(noise.powers)
    }  # fmt: skip

    def total(integers: Collection[str]) -> float:
        return math.fsum(power for index, power in powers.items() if holders[index].intersection(integers))

    budget = found.float_seconds / 100 * 10 / (price * math.log(10))
    left = total(members)
    for _ in range(_MOST_CUTS):
        costs = {index: budget * power / (left + ENOUGH) for index, power in powers.items()}
        chosen = choose_nodes(_with_noise(found.choice, members, costs, holders))
        members, before, left = members & chosen, left, total(chosen)
        if left == before:
            break
    return {name for name in quantized if groups.find(name) in members}


def _with_noise(
    choice: KernelChoice, members: Collection[str], costs: Mapping[int, float], holders: Mapping[int, set[str]]
) -> KernelChoice:
    """The choice among groups that are in integers, with a group more for the noise of each tensor."""
    in_float, in_integers = dict(choice.in_float), dict(choice.in_integers)
    # More than all else together keeps what is in float there.
    most = 1.0 + 2 * (sum(in_float.values()) + sum(in_integers.values())) + sum(costs.values())
    most += sum(edge.encode + edge.decode for edge in choice.edges)
    in_integers |= dict.fromkeys(set(in_integers) - set(members), most)
    names = {index: f"noise {index}" for index in costs}
    in_float |= dict.fromkeys(names.values(), 0.0)
    in_integers |= {names[index]: cost for index, cost in costs.items()}
    needs = {(group, names[index]) for index, groups in holders.items() for group in groups if group in in_float}
    return replace(choice, in_float=in_float, in_integers=in_integers, needs=choice.needs | needs)
