"""Layers that runtimes may need alike: those that read one tensor (q/k/v, gate/up), and all experts of a mixture.

vLLM and SGLang fuse the matrices of such layers into one, which has one type of codes; transformers keeps them apart.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from quark.torch.algorithms.layer_inputs import input_groups
from quark.torch.calibration.experts import EXPERT
from quark.torch.model.blocks import Call


def alike_in_block(name: str, block: nn.Module, layers: Collection[str], call: Call) -> list[list[str]]:
    """The layers of a block in groups.

    Args:
        name: Of the block.
        block: With weights, and its hooks as they are.
        layers: Full names of the layers to group.
        call: Of the block.

    Returns:
        Full names. A layer that this call does not reach is a group of its own.
    """
    mixtures = alike_experts(layers)
    experts = {layer for group in mixtures for layer in group}
    prefix = f"{name}."
    single = [layer.removeprefix(prefix) for layer in layers if layer.startswith(prefix) and layer not in experts]
    groups = [[prefix + leaf for leaf in group] for group in input_groups(block, single, call)]
    reached = {layer for group in groups for layer in group}
    return [*groups, *([prefix + leaf] for leaf in single if prefix + leaf not in reached), *mixtures]


def alike_experts(layers: Collection[str]) -> list[list[str]]:
    """The layers of each mixture of experts, by their names."""
    mixtures: dict[str, list[str]] = {}
    for layer in layers:
        expert = EXPERT.fullmatch(layer)
        if expert:
            mixtures.setdefault(expert["block"], []).append(layer)
    return list(mixtures.values())


def is_mixture(layers: Sequence[str]) -> bool:
    """Whether a group is the experts of a mixture."""
    return EXPERT.fullmatch(layers[0]) is not None


def patterns_of_group(layers: Sequence[str]) -> list[str]:
    """Patterns of `layer_quant_config` that match these layers: one for a mixture, which may have thousands."""
    expert = EXPERT.fullmatch(layers[0])
    return [f"{expert['block']}.*"] if expert else list(layers)
