"""From the module to the file: under which name a published checkpoint holds a tensor."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from quark.base.libraries.transformers import can_be_turned, conversions, renamed, renamings


def published_names(model: nn.Module) -> Callable[[str], str]:
    """The function from the name of a tensor in the module to its name in a checkpoint.

    A name that transformers' renamings would not bring back keeps the module's form.
    """
    rules = [rule for rule in renamings(conversions(model)) if can_be_turned(rule)]
    reverse = [rule.reverse_transform() for rule in reversed(rules)]

    def publish(name: str) -> str:
        out = renamed(name, reverse)
        return out if renamed(out, rules) == name else name

    return publish


def layers_published(model: nn.Module) -> Callable[[str], str]:
    """The function from the name of a layer to that in a checkpoint; see `published_names`."""
    publish = published_names(model)
    return lambda layer: publish(f"{layer}.weight").removesuffix(".weight")
