"""What a folder holds that the class of its model does not build, such as layers that predict further tokens (MTP).

It is carried whole: in the type that it is stored in, or decoded to the type of the model where it is stored in codes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from quark.torch.checkpoint.shards import Entry
from quark.torch.checkpoint.sources.source import Source, readable_quantization
from quark.torch.model.folder_files import shard_files
from quark.torch.model.model_folder import read_config
from quark.torch.model.published_names import dropped_names


def carried_entries(source: Source, names: Iterable[str], dtype: torch.dtype) -> list[Entry]:
    """Entries of tensors as they are.

    Args:
        source: The folder's tensors.
        names: Of float tensors.
        dtype: Of the model.
    """
    return [_entry(source, name, dtype if source.is_coded(name) else source.meta(name).dtype) for name in names]


def _entry(source: Source, name: str, dtype: torch.dtype) -> Entry:
    shape = source.shape(name)

    def make() -> dict[str, torch.Tensor]:
        return {"": source.read(name, dtype, shape) if source.is_coded(name) else source.stored(name)}

    return name, make, {"": torch.empty(shape, dtype=dtype, device="meta")}


def carried_of(model: Any, folder: Path | None) -> list[Entry]:
    """What the folder that a model was loaded from holds beside it; nothing where it holds no safetensors files."""
    if folder is None or not list(folder.glob("*.safetensors")):
        return []
    source = Source(shard_files(folder), readable_quantization(read_config(folder)))
    return carried_entries(source, dropped_names(model, source.names()), model.dtype)
