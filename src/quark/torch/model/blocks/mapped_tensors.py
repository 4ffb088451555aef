"""Tensors that lie in files and are read when somebody reads them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quark.errors import FormatError, OutputError

ALIGNED = 64
"""Bytes at whose multiples tensors begin in a file."""


def keep_in_file(tensors: Sequence[torch.Tensor], folder: Path) -> list[torch.Tensor]:
    """The values of tensors, mapped from a file without a name, which is gone with the last of them, however that ends.

    Raises OutputError where it cannot be written.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            places = []
            for tensor in tensors:
                file.write(b"\0" * (-file.tell() % ALIGNED))
                places.append(file.tell())
                if tensor.numel():
                    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            return [_mapped(file, start, x.dtype, x.shape) for x, start in zip(tensors, places, strict=True)]
    except OSError as error:
        raise OutputError(f"What became of the weights on disk cannot be kept in {folder}: {error}.") from error


def mapped_offload(path: Path, entry: Mapping[str, Any]) -> torch.Tensor:
    """A tensor of a folder that accelerate wrote.

    Args:
        path: The file.
        entry: Of its index: "dtype" and "shape".
    """
    dtype = getattr(torch, str(entry["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"{path.name}: the index of the offload folder names the type {entry['dtype']!r}.")
    try:
        return _mapped(path, 0, dtype, torch.Size(entry["shape"]))
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} does not hold the tensor that its index names: {error}.") from error


def mapped_safetensors(path: Path, name: str) -> torch.Tensor:
    """A tensor of a safetensors file."""
    from safetensors import safe_open

    with safe_open(path, framework="pt", device="cpu") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def _mapped(file: Any, start: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """A tensor of a file: what is written to it stays in memory."""
    count = shape.numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    mapped = np.memmap(file, np.uint8, "c", start, (count * dtype.itemsize,))
    return torch.from_numpy(mapped).view(dtype).reshape(shape)
