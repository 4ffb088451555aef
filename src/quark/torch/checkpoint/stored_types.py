"""Tensors that are not quantized go into a checkpoint in the type that the source folder stores them in.

transformers rounds what it loads to the type of the model. Biases that choose experts, decays of state-space layers and
norms are often stored in float32 beside weights in bfloat16: their bits below the type of the model are in the folder
only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from quark.errors import FormatError
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.shards import Entry, Plain, plain_entry
from quark.torch.checkpoint.stored_tensors import HALF, is_wide
from quark.torch.model.names import OtherForm, other_forms


class StoredTypes:
    """Makes entries of float tensors in the types of a source folder.

    Args:
        folder: The folder.
        model: Of its class, in the dtype of the folder.
        narrow: Whether a type narrower than the model's is taken, too: not where an algorithm may change values.
    """

    def __init__(self, folder: OpenedFolder, model: Any, narrow: bool) -> None:
        self.source, self.dtype, self.narrow = folder.source, model.dtype, narrow
        self.names = {name: stored for name, stored in folder.names(model).items() if stored in folder.metas}

    def entry(self, name: str, tensor: torch.Tensor) -> Entry:
        """The entry of a tensor of the model: of the stored values where the model's are those, rounded."""
        stored = self._stored_type(name, tensor)
        if stored is None:
            return plain_entry(name, tensor)

        def make() -> dict[str, torch.Tensor]:
            there = self.source.stored(self.names[name])
            same = torch.equal(there.to(tensor.dtype), tensor.cpu())
            return {"": there if same else tensor.to(stored)}

        return name, make, {"": torch.empty(tensor.shape, dtype=stored, device="meta")}

    def _stored_type(self, name: str, tensor: torch.Tensor) -> torch.dtype | None:
        """The type to store a tensor in, where it is not the model's."""
        if name not in self.names:
            return None
        there, own = self.source.meta(self.names[name]), tensor.dtype
        if there.shape != tensor.shape or there.dtype == own or not (is_wide(there.dtype) and is_wide(own)):
            return None
        # Of the two half types a reader takes that of the config only.
        readable = there.dtype not in HALF or there.dtype == self.dtype
        return there.dtype if readable and (self.narrow or there.dtype.itemsize > own.itemsize) else None


def stored_plain(model: Any, folder: OpenedFolder | None, narrow: bool) -> Plain:
    """Return the function that makes entries of the float tensors of a model in memory.

    Args:
        model: Of transformers.
        folder: That it was loaded from, if that is known.
        narrow: See `StoredTypes`.

    A model that was loaded in, or made to be of, another type than its folder's config names keeps its own types.
    """
    try:
        if folder is None or folder.source is None or model.dtype != folder.dtype:
            return plain_entry
    except FormatError:  # of pickled weights, or of files that are gone
        return plain_entry
    return StoredTypes(folder, model, narrow).entry


def forms_of(model: Any, folder: OpenedFolder | None, coded: Iterable[str] = ()) -> list[OtherForm]:
    """Return the forms in which a checkpoint has other tensors than its model: as in the folder that it came from.

    Args:
        model: With weights or without.
        folder: That it was loaded from, if that is known.
        coded: Names of the layers that are stored in codes.
    """
    source = None if folder is None else folder.source_if_any
    if folder is None or source is None:
        return other_forms(model, coded)  # of pickled weights, for one
    named = folder.float_names(model)
    return other_forms(model, coded, lambda name: source.shape(named[name]) if name in named else None)
