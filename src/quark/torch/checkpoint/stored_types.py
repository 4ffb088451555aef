"""Tensors that are not quantized go into a checkpoint in the type that the source folder stores them in.

transformers rounds what it loads to the type of the model. Biases that choose experts, decays of state-space layers and
norms are often stored in float32 beside weights in bfloat16: their bits below the type of the model are in the folder
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from quark.base.libraries.transformers import folder_of
from quark.errors import FormatError
from quark.torch.checkpoint.shards import Entry, Plain, plain_entry
from quark.torch.checkpoint.sources.methods import readable_quantization
from quark.torch.checkpoint.sources.source import Source
from quark.torch.checkpoint.stored_tensors import HALF, is_wide
from quark.torch.model.folder_files import shard_files
from quark.torch.model.meta_model import saved_dtype
from quark.torch.model.model_folder import read_config
from quark.torch.model.names import OtherForm, other_forms, source_names


class StoredTypes:
    """Makes entries of float tensors in the types of a source folder.

    Args:
        source: The folder's tensors.
        names: Name in the model -> name in the folder.
        dtype: In which the model was loaded; that of the folder's config.
        narrow: Whether a type narrower than the model's is taken, too: not where an algorithm may change values.
    """

    def __init__(self, source: Source, names: Mapping[str, str], dtype: torch.dtype, narrow: bool) -> None:
        self.source, self.names, self.dtype, self.narrow = source, names, dtype, narrow

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


def source_folder(model: Any) -> Path | None:
    """The folder that a model was loaded from, where its config says it and it is there."""
    path = folder_of(model.config) or getattr(model, "name_or_path", "")
    return Path(path) if path and Path(path).is_dir() else None


def stored_plain(model: Any, folder: Path | None, narrow: bool) -> Plain:
    """What makes entries of the float tensors of a model in memory.

    Args:
        model: Of transformers.
        folder: That it was loaded from, if that is known.
        narrow: See `StoredTypes`.

    A model that was loaded in, or made to be of, another type than its folder's config names keeps its own types.
    """
    try:
        source = None if folder is None else Source(shard_files(folder), readable_quantization(read_config(folder)))
    except FormatError:  # of pickled weights, or of files that are gone
        source = None
    if source is None or folder is None or model.dtype != (saved_dtype(folder) or source.dtype()):
        return plain_entry
    named = source_names(model, source.stored_names())
    return StoredTypes(source, named, model.dtype, narrow).entry


def forms_of(model: Any, folder: Path | None, coded: Iterable[str] = ()) -> list[OtherForm]:
    """What a checkpoint of a model holds in other tensors than the model: as the folder has it that it came from.

    Args:
        model: With weights or without.
        folder: That it was loaded from, if that is known.
        coded: Names of the layers that are stored in codes.
    """
    if folder is None or not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        return other_forms(model, coded)  # of pickled weights, for one
    source = Source(shard_files(folder), readable_quantization(read_config(folder)))
    return forms_of_source(model, source, coded)


def forms_of_source(model: Any, source: Source, coded: Iterable[str] = ()) -> list[OtherForm]:
    """The same of an open folder."""
    names = set(source.names())
    named = {name: file for name, file in source_names(model, names).items() if file in names}
    return other_forms(model, coded, lambda name: source.shape(named[name]) if name in named else None)
