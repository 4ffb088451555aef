"""Tied weights: parameters that have several names, such as an embedding that is the output head too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

_MOST_WORK = 10_000
"""Steps in the search for a byte that two views have in common; if it takes more, they count as sharing one."""


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Name in the state dict -> all names of the same parameter, itself first."""
    groups: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    return {name: [name, *(n for n in groups[id(tensor)] if n != name)] for name, tensor in state.items()}


def first_names(model: nn.Module) -> list[str]:
    """The first name of each tensor of the state dict: what a folder holds, which has each once."""
    seen: set[str] = set()
    found = []
    for name, names in tied_names(model).items():
        if name not in seen:
            found.append(name)
        seen.update(names)
    return found


def overlapping(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Ids of the tensors that share memory: with another of these (the same object, a view, a slice), or in
    themselves, as what `expand` gives.

    Columns side by side of one matrix lie in one another's range of bytes, and share none of them.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]
    times = Counter(map(id, filled))
    found = {id(x) for x in filled if times[id(x)] > 1 or (0 in x.stride() and not x.is_contiguous())}
    reaching: list[_Bytes] = []
    for place in sorted(map(_Bytes, {id(x): x for x in filled}.values()), key=lambda place: place.start):
        reaching = [other for other in reaching if other.end > place.start]
        for other in reaching:
            # What is found already tells nothing new.
            if not {place.identity, other.identity} <= found and place.shares(other):
                found |= {place.identity, other.identity}
        reaching.append(place)
    return found


class _Bytes:
    """Where a tensor lies in memory, from `start` to `end`; one without memory lies where its object does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.identity, self.device = id(tensor), tensor.device
        try:
            # Of a view on the meta device it is the offset, which is no address.
            start = 0 if tensor.is_meta else tensor.data_ptr()
        except RuntimeError:  # a subclass without a storage
            start = 0
        size = tensor.element_size() if start else 1
        self.shape = tuple(tensor.shape) if start else ()
        self.strides = tuple(size * stride for stride in tensor.stride()) if start else ()
        self.start = start or id(tensor)
        self.end = self.start + size + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        self.__array_interface__ = {
            "version": 3,
            "data": (self.start, True),
            "shape": self.shape,
            "strides": self.strides,
            "typestr": f"|V{size}",
        }

    def shares(self, other: _Bytes) -> bool:
        """Return True where both have a byte in common. Nothing is read."""
        try:
            both = np.asarray(self), np.asarray(other)
            return self.device == other.device and np.shares_memory(*both, _MOST_WORK)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True


def tying_configs(model: nn.Module) -> list[Any]:
    """The transformers configs of a model that say whether embedding and head are tied."""
    config = getattr(model, "config", None)
    configs = [config, getattr(config, "text_config", None)]
    return [item for item in configs if getattr(item, "tie_word_embeddings", None) is not None]
