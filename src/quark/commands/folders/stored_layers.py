"""The layers of a stored model folder, for `quark inspect`: how each is stored, in how many bits for a weight.

bits = 8 * bytes of codes, scales and zero points / weights that the layer has in the float model
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quark.errors import NotSupportedError, QuarkError, one_line
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.sources.methods import section_of

BIASES = ("bias",)


@dataclass(frozen=True)
class StoredLayers:
    """Layers of one name but for their numbers, stored in the same form.

    Attributes:
        name: With "*" in the place of each number between dots.
        count: How many.
        stored: Their tensors with dtypes, as in "qweight int32, scales float16".
        bits: For a weight, with scales and zero points; None where the float layer is not known.
        size: Bytes of all.
    """

    name: str
    count: int
    stored: str
    bits: float | None
    size: int


@dataclass(frozen=True)
class StoredFolder:
    """How a folder is stored.

    Attributes:
        quantization: What its config says of it; empty for a float model.
        layers: What holds a matrix, in the order of the files; empty for a float model.
        why_not_read: Why no command reads its values; "" where they do.
    """

    quantization: dict[str, Any]
    layers: list[StoredLayers]
    why_not_read: str


def stored_folder(folder: Path) -> StoredFolder:
    """How the weights of a folder are stored; reads no values.

    Raises FormatError where that is not what its config.json says.
    """
    opened = OpenedFolder(folder)
    opened.check()
    section = section_of(opened.config)
    if not section:
        return StoredFolder({}, [], "")
    why, owners = "", dict[str, str]()
    try:
        if opened.is_read:
            owners = opened.source.owners()
    except NotSupportedError as error:
        why = one_line(error)
    return StoredFolder(section, _layers(opened, owners), why)


def _layers(folder: OpenedFolder, owners: Mapping[str, str]) -> list[StoredLayers]:
    """See `StoredFolder`.

    Args:
        folder: With weight files.
        owners: Name of a stored tensor -> the float tensor that it is a part of, where the name does not say it.
    """
    metas = folder.metas
    layers: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in metas.items():
        parent = owners.get(name, name).rpartition(".")[0]
        layers[parent][name.removeprefix(f"{parent}.")] = tensor
    weights = _float_weights(folder)
    found: Counter[tuple[str, str, float | None]] = Counter()
    sizes: Counter[tuple[str, str, float | None]] = Counter()
    for name, tensors in layers.items():
        if all(tensor.ndim < 2 for tensor in tensors.values()):
            continue
        size = sum(x.numel() * x.element_size() for leaf, x in tensors.items() if leaf not in BIASES)
        bits = round(8 * size / weights[name], 2) if weights.get(name) else None
        shown = ", ".join(f"{leaf} {str(x.dtype).removeprefix('torch.')}" for leaf, x in sorted(tensors.items()))
        row = (re.sub(r"(?<=\.)\d+(?=\.)", "*", name), shown, bits)
        found[row] += 1
        sizes[row] += size
    return [StoredLayers(row[0], count, row[1], row[2], sizes[row]) for row, count in found.items()]


def _float_weights(folder: OpenedFolder) -> dict[str, int]:
    """Weights of each layer of the float model; none where transformers does not know the model."""
    try:
        model = folder.skeleton
    except QuarkError:
        return {}
    return {
        name.removesuffix(".weight"): math.prod(weight.shape)
        for name, weight in model.named_parameters(remove_duplicate=False)
        if name.endswith(".weight")
    }
