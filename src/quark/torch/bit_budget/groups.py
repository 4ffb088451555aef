"""Layers that runtimes may need alike: those that a server makes one of, found as the blocks of a model run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

from torch import nn

from quark.torch.algorithms.layer_inputs import input_groups
from quark.torch.calibration.experts import EXPERT
from quark.torch.formats.fused_groups import by_table, mixtures_of
from quark.torch.model.blocks import Call


def alike_in_block(
    name: str, block: nn.Module, layers: Collection[str], call: Call, known_as: Collection[str] = ()
) -> list[list[str]]:
    """The layers of a block in groups.

    Args:
        name: Of the block.
        block: With weights, and its hooks as they are.
        layers: Full names of the layers to group.
        call: Of the block.
        known_as: The architectures of the model.

    Returns:
        Full names. A layer that is made one with no other is a group of its own, and so is one whose name no table
        knows, and which this call does not reach.
    """
    mixtures = list(mixtures_of(layers).values())
    experts = set(chain.from_iterable(mixtures))
    prefix = f"{name}."
    single = [layer for layer in layers if layer.startswith(prefix) and layer not in experts]
    known, unknown = by_table(single, known_as)
    groups = [list(group.layers) for group in known]
    for module, leaves in unknown:
        inside = [f"{module}.{leaf}".removeprefix(prefix) for leaf in leaves]
        groups += [[prefix + leaf for leaf in group] for group in input_groups(block, inside, call)]
    grouped = set(chain.from_iterable(groups))
    groups += [[layer] for layer in single if layer not in grouped]
    order = {layer: index for index, layer in enumerate(single)}
    return [*sorted(groups, key=lambda group: order[group[0]]), *mixtures]


def is_mixture(layers: Sequence[str]) -> bool:
    """Whether a group is the experts of a mixture."""
    return EXPERT.fullmatch(layers[0]) is not None


def patterns_of_group(layers: Sequence[str]) -> list[str]:
    """Patterns of `layer_quant_config` that match these layers: one for a mixture, which may have thousands."""
    expert = EXPERT.fullmatch(layers[0])
    return [f"{expert['block']}.*"] if expert else list(layers)
