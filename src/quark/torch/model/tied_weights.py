"""Tied weights: parameters that have several names, such as an embedding that is the output head too."""

from __future__ import annotations

from typing import Any

from torch import nn


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Name in the state dict -> all names of the same parameter, itself first."""
    groups: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    return {name: [name, *(n for n in groups[id(tensor)] if n != name)] for name, tensor in state.items()}


def tying_configs(model: nn.Module) -> list[Any]:
    """The transformers configs of a model that say whether embedding and head are tied."""
    config = getattr(model, "config", None)
    configs = [config, getattr(config, "text_config", None)]
    return [item for item in configs if getattr(item, "tie_word_embeddings", None) is not None]
