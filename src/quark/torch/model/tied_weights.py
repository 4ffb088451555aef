"""Tied weights: parameters that have several names, such as an embedding that is the output head too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Name in the state dict -> all names of the same parameter, itself first."""
    groups: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    return {name: [name, *(n for n in groups[id(tensor)] if n != name)] for name, tensor in state.items()}


def overlapping(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Ids of the tensors that share memory: with another of these (the same object, a view, a slice), or in
    themselves, as what `expand` gives.
    """
    held = [tensor for tensor in tensors if tensor.numel()]
    ranges = sorted((*_bytes(tensor), id(tensor)) for tensor in held)
    found = {id(tensor) for tensor in held if 0 in tensor.stride() and not tensor.is_contiguous()}
    furthest, holder = 0, 0
    for start, end, identity in ranges:
        if start < furthest:
            found |= {identity, holder}
        if end > furthest:
            furthest, holder = end, identity
    return found


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """From where to where a tensor lies in memory; one without memory lies where its object does."""
    try:
        # Of a view on the meta device it is the offset, which is no address.
        start = 0 if tensor.is_meta else tensor.data_ptr()
    except RuntimeError:  # a subclass without a storage
        start = 0
    if not start:
        return id(tensor), id(tensor) + 1
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def tying_configs(model: nn.Module) -> list[Any]:
    """The transformers configs of a model that say whether embedding and head are tied."""
    config = getattr(model, "config", None)
    configs = [config, getattr(config, "text_config", None)]
    return [item for item in configs if getattr(item, "tie_word_embeddings", None) is not None]
