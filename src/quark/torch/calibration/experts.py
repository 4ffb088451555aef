"""Mixture-of-experts layers: ranges and scales where an expert sees few tokens, and experts that are solved at once.

shared:  amax_k = max over the experts of a block of amax, for each projection k
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

from torch import nn

from quark.core.array import DEVICE_CHUNK
from quark.errors import CalibrationError
from quark.torch.layers.fake_quant import FakeQuantize
from quark.torch.model.passes import UnfusedExperts

EXPERT = re.compile(r"(?P<block>.*expert[^.]*)\.(?:\w*_)?(?P<index>\d+)\.(?P<rest>.+)", re.I)
"""Full name of a tensor of an expert: "model.layers.0.mlp.experts.3.down_proj.input", or "...experts.expert_3..."."""


AT_ONCE = 1 << 24
"""Bytes of the second moments and weights, both in float64, of the experts that are reached at once on a CPU; what
a solver needs beside is some ten times that. Measured: with 1024 channels, of which no two fit, one after another is
nearly as fast."""


def reached_together(
    mixture: UnfusedExperts, name: str, groups: Sequence[Sequence[str]]
) -> dict[tuple[bool, int], dict[int, int]]:
    """Which experts a solver may reach at once, in bounded memory.

    Args:
        mixture: The experts; those of `groups` count.
        name: Its name, the prefix of the names in `groups`.
        groups: Names of the layers that read one tensor, in running order.

    Returns:
        (whether it is for the down projections, first expert) -> expert -> index of its group; two experts at least.
    """
    turns: dict[bool, dict[int, int]] = {False: {}, True: {}}
    for index, group in enumerate(groups):
        inside = group[0].removeprefix(f"{name}.")
        expert, _, leaf = inside.partition(".")
        if inside != group[0] and expert.isdigit():
            turns[leaf == mixture.names[2]][int(expert)] = index
    reached = {}
    for down, places in turns.items():
        experts = sorted(places)
        first = groups[places[experts[0]]] if experts else ()
        step = at_once([mixture.get_submodule(leaf.removeprefix(f"{name}.")) for leaf in first])
        for start in range(0, len(experts), step):
            batch = experts[start : start + step]
            if len(batch) > 1:
                reached[down, batch[0]] = {expert: places[expert] for expert in batch}
    return reached


def at_once(layers: Sequence[nn.Module]) -> int:
    """How many experts with these layers are in flight at once."""
    weights = [cast(nn.Linear, layer).weight for layer in layers]
    if not weights:
        return 1
    columns, rows = weights[0].shape[1], sum(len(weight) for weight in weights)
    bound = AT_ONCE if weights[0].device.type == "cpu" else DEVICE_CHUNK
    return max(1, bound // (8 * columns * (columns + rows)))


def expert_of(tensor: str) -> str | None:
    """Full name of the expert that a tensor or a layer is of; None for one that is of no expert."""
    found = EXPERT.fullmatch(tensor) or EXPERT.fullmatch(f"{tensor}.weight")
    return tensor[: found.end("index")] if found else None


def finish_expert_ranges(quantizers: Mapping[str, FakeQuantize], sync: bool) -> set[str]:
    """Set the ranges of experts after observing: one range for all of a block if `sync`, and a range for each.

    Where no calibration token reached some expert, its ranges are those that cover the others of its block.

    Args:
        quantizers: Full name of the tensor -> its quantizer, which has observed.
        sync: Whether the experts of a block share the range of their inputs.

    Returns:
        The experts with ranges of others.

    Raises:
        CalibrationError: No calibration token reached any expert of a block; names them.
    """
    if sync:
        for name_in_block, members in _families(quantizers).items():
            if name_in_block[1].endswith(".input"):
                FakeQuantize.share_observed([*members.values()])
    borrowing: set[str] = set()
    lost: dict[str, None] = {}
    for members in _families(quantizers).values():
        reached = [one for one in members.values() if one.observer is not None and one.observer.count]
        for name, quantizer in members.items():
            if quantizer.observer is None or quantizer.observer.count:
                continue
            if reached:
                quantizer.observe_as(reached)
                borrowing.add(str(expert_of(name)))
            else:
                lost[str(expert_of(name))] = None
    if lost:
        first = f"{', '.join([*lost][:5])}{', ...' if len(lost) > 5 else ''}"
        raise CalibrationError(
            f"No calibration token was routed to {len(lost)} experts ({first}), nor to any other expert of that block. "
            "Possible: more calibration data, calibrate_all_experts=True in the QConfig, or a dynamic or weight-only "
            "scheme."
        )
    return borrowing


def _families(quantizers: Mapping[str, FakeQuantize]) -> dict[tuple[str, str], dict[str, FakeQuantize]]:
    """(Name of a mixture, of a tensor in its experts) -> full name -> quantizer of that tensor."""
    families: dict[tuple[str, str], dict[str, FakeQuantize]] = {}
    for name, quantizer in quantizers.items():
        expert = EXPERT.fullmatch(name)
        if expert:
            families.setdefault((expert["block"], expert["rest"]), {})[name] = quantizer
    return families
