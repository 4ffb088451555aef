"""From the module to the file: under which name a published checkpoint holds a tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import nn

from quark.torch.model.names.conversions import conversions, renamed


def published_names(model: nn.Module) -> Callable[[str], str]:
    """The function from the name of a tensor in the module to its name in a checkpoint.

    A name that transformers' renamings would not bring back keeps the module's form.
    """
    core = sys.modules.get("transformers.core_model_loading")
    known = conversions(model)
    if core is None or not known:
        return lambda name: name
    renamings = [c for c in known if isinstance(c, core.WeightRenaming) and not isinstance(c, core.PrefixChange)]
    reverse = [renaming.reverse_transform() for renaming in reversed(renamings)]

    def publish(name: str) -> str:
        out = renamed(name, reverse)
        return out if renamed(out, renamings) == name else name

    return publish


def layers_published(model: nn.Module) -> Callable[[str], str]:
    """The function from the name of a layer to that in a checkpoint; see `published_names`."""
    publish = published_names(model)
    return lambda layer: publish(f"{layer}.weight").removesuffix(".weight")
