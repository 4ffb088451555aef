"""Layers that runtimes may need alike: those that a server makes one of, found as the blocks of a model run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

from torch import nn

from quark.torch.algorithms.layer_inputs import input_groups
from quark.torch.calibration.experts import EXPERT
from quark.torch.formats.fused_groups import FusedGroup, by_table, mixtures_of, united
from quark.torch.model.blocks import Call


def groups_in_block(
    name: str,
    block: nn.Module,
    layers: Collection[str],
    call: Call,
    known_as: Collection[str],
    programs: Sequence[str],
) -> list[list[str]]:
    """The layers of a block in groups.

    Args:
        name: Of the block.
        block: With weights, and its hooks as they are.
        layers: Full names of the layers to group.
        call: Of the block.
        known_as: The architectures of the model.
        programs: Servers; what one of them makes one of is alike.

    Returns:
        Full names. A layer that is made one with no other is a group of its own, and so is one whose name no table
        knows, and which this call does not reach.
    """
    mixtures = list(mixtures_of(layers).values())
    experts = set(chain.from_iterable(mixtures))
    prefix = f"{name}."
    single = [layer for layer in layers if layer.startswith(prefix) and layer not in experts]
    found, unknown = by_table(single, known_as, programs)
    for module, leaves in unknown:
        inside = [f"{module}.{leaf}".removeprefix(prefix) for leaf in leaves]
        parts = (tuple(prefix + leaf for leaf in group) for group in input_groups(block, inside, call))
        found += [FusedGroup(part, "") for part in parts]
    groups = [list(group.layers) for group in united(found, single)]
    grouped = set(chain.from_iterable(groups))
    groups += [[layer] for layer in single if layer not in grouped]
    order = {layer: index for index, layer in enumerate(single)}
    return [*sorted(groups, key=lambda group: order[group[0]]), *mixtures]


def patterns_of_group(layers: Sequence[str]) -> list[str]:
    """Patterns of `layer_quant_config` that match these layers: one for a mixture, which may have thousands."""
    expert = EXPERT.fullmatch(layers[0])
    return [f"{expert['block']}.*"] if expert else list(layers)
