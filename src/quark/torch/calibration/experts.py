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

EXPERT = re.compile(r"(?P<block>.*expert[^.]*)\.(?P<index>\d+)\.(?P<rest>.+)", re.I)
"""Full name of a tensor of an expert: "model.layers.0.mlp.experts.3.down_proj.input"."""


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
        step = _fitting([mixture.get_submodule(leaf.removeprefix(f"{name}.")) for leaf in first])
        for start in range(0, len(experts), step):
            batch = experts[start : start + step]
            if len(batch) > 1:
                reached[down, batch[0]] = {expert: places[expert] for expert in batch}
    return reached


def _fitting(layers: Sequence[nn.Module]) -> int:
    """How many experts with these layers are in flight at once."""
    weights = [cast(nn.Linear, layer).weight for layer in layers]
    if not weights:
        return 1
    columns, rows = weights[0].shape[1], sum(len(weight) for weight in weights)
    bound = AT_ONCE if weights[0].device.type == "cpu" else DEVICE_CHUNK
    return max(1, bound // (8 * columns * (columns + rows)))


def finish_expert_ranges(quantizers: Mapping[str, FakeQuantize], sync: bool) -> None:
    """What experts need after observing: one range for all of a block if `sync`, and tokens for each.

    Args:
        quantizers: Full name of the tensor -> its quantizer, which has observed.
        sync: Whether the experts of a block share the range of their inputs.

    Raises:
        CalibrationError: No calibration token reached some expert; names them.
    """
    if sync:
        share_expert_ranges(quantizers)
    require_tokens(quantizers)


def share_expert_ranges(quantizers: Mapping[str, FakeQuantize]) -> None:
    """Let the experts of a block have one range for the inputs of each projection: the one that covers all."""
    families: dict[tuple[str, str], list[FakeQuantize]] = {}
    for name, quantizer in quantizers.items():
        expert = EXPERT.fullmatch(name)
        if expert and expert["rest"].endswith(".input"):
            families.setdefault((expert["block"], expert["rest"]), []).append(quantizer)
    for members in families.values():
        FakeQuantize.share_observed(members)


def require_tokens(quantizers: Mapping[str, FakeQuantize]) -> None:
    """Raise CalibrationError if no calibration token reached some expert; names them."""
    idle: dict[str, None] = {}
    for name, quantizer in quantizers.items():
        expert = EXPERT.fullmatch(name)
        if expert and quantizer.observer is not None and quantizer.observer.count == 0:
            idle[f"{expert['block']}.{expert['index']}"] = None
    if not idle:
        return
    experts = list(idle)
    raise CalibrationError(
        f"No calibration token was routed to {len(experts)} experts: {', '.join(experts[:5])}"
        f"{', ...' if len(experts) > 5 else ''}. Possible: more calibration data, a dynamic or weight-only scheme, or "
        "sync_moe_expert_input_amax=True in the QConfig, which gives all experts of a block one input range."
    )
